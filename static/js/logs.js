// The log reader: asks for what is new from its cursor on, one long request after the other, and keeps the newest lines.
// When an attempt has ended and the next one has begun, it goes on with that one, unless an older one was chosen.
const MOST = 5000;
const PAUSE = 1000;

function tone(line) {
  if (/\b(ERROR|CRITICAL|FATAL|Traceback)\b|^\w*(Error|Exception):/.test(line)) return "is-bad";
  return /\bWARN(ING)?\b/.test(line) ? "is-warn" : "";
}

class Reader {
  constructor(root) {
    this.root = root;
    this.lines = root.querySelector(".log-lines");
    this.said = root.querySelector("[data-log-said]");
    this.nothing = root.querySelector("[data-log-nothing]");
    this.count = root.querySelector("[data-log-count]");
    this.filter = document.querySelector("[data-log-filter]");
    this.follow = root.querySelector("[data-log-follow]");
    this.cursor = root.dataset.cursor;
    this.attempt = root.dataset.attempt;
    this.following = true;
    this.rows().forEach((row) => this.dress(row));
    this.tell();
    this.toEnd();
    this.lines.addEventListener("scroll", () => this.set(this.atEnd()));
    this.follow.addEventListener("click", () => { this.set(!this.following); if (this.following) this.toEnd(); });
    this.filter?.addEventListener("input", () => { this.rows().forEach((row) => this.sift(row)); this.tell(); });
    if (root.dataset.more) this.run();
  }

  rows() { return [...this.lines.querySelectorAll("div")]; }
  atEnd() { return this.lines.scrollHeight - this.lines.scrollTop - this.lines.clientHeight < 24; }
  toEnd() { this.lines.scrollTop = this.lines.scrollHeight; }

  set(following) {
    this.following = following;
    this.follow.setAttribute("aria-pressed", String(following));
    this.follow.textContent = following ? "Following" : "Follow";
  }

  dress(row) {
    const [time, text] = row.children;
    const name = tone(text.textContent);
    if (name) row.classList.add(name);
    const at = new Date(time.dateTime);
    time.textContent = at.toLocaleTimeString(undefined, { hour12: false });
    time.title = at.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "long" });
  }

  sift(row) {
    const wanted = this.filter?.value.toLowerCase() ?? "";
    row.hidden = wanted !== "" && !row.lastElementChild.textContent.toLowerCase().includes(wanted);
  }

  // Says how many lines are shown, and when none matches.
  tell() {
    const wanted = this.filter?.value ?? "";
    const rows = this.rows();
    const shown = wanted ? rows.filter((row) => !row.hidden).length : rows.length;
    const lines = rows.length === 1 ? "1 line" : `${rows.length.toLocaleString()} lines`;
    this.count.textContent = rows.length ? `· ${wanted ? `${shown.toLocaleString()} of ` : ""}${lines}` : "";
    this.nothing.hidden = !rows.length || shown > 0;
    this.nothing.textContent = this.nothing.hidden ? "" : `No line contains “${wanted}”.`;
  }

  add(lines, times) {
    const rows = document.createDocumentFragment();
    lines.forEach((line, index) => {
      const row = document.createElement("div");
      const time = document.createElement("time");
      time.dateTime = new Date(times[index] * 1000).toISOString();
      const text = document.createElement("span");
      text.textContent = line || " ";
      row.append(time, text);
      this.dress(row);
      this.sift(row);
      rows.append(row);
    });
    this.lines.querySelector("[data-log-none]")?.remove();
    this.lines.append(rows);
    while (this.lines.childElementCount > MOST) this.lines.firstElementChild.remove();
    this.tell();
    if (this.following) this.toEnd();
  }

  // The engine was started anew: what was read stays, and the next attempt's lines come under it.
  next(attempt) {
    this.attempt = String(attempt);
    this.cursor = "0-0";
    const head = document.createElement("p");
    head.className = "log-attempt";
    head.textContent = `Attempt ${attempt}`;
    this.lines.querySelector("[data-log-none]")?.remove();
    this.lines.append(head);
    this.root.querySelector("[data-log-number]").textContent = this.attempt;
    const chosen = document.querySelector("[data-log-attempt]");
    if (![...chosen.options].some((option) => option.value === this.attempt)) chosen.prepend(new Option(`${attempt} · running`, this.attempt));
    chosen.value = this.attempt;
    const download = this.root.querySelector("[data-log-download]");
    const address = new URL(download.href);
    address.searchParams.set("attempt", this.attempt);
    download.href = address;
    if (this.following) this.toEnd();
  }

  async run() {
    let failures = 0;
    while (this.root.isConnected) {
      try {
        const address = `${this.root.dataset.more}&attempt=${this.attempt}&cursor=${encodeURIComponent(this.cursor)}`;
        const answer = await fetch(address, { headers: { Accept: "application/json" } });
        if (answer.status === 401) {
          this.said.textContent = "You are signed out. It goes on when you have signed in again.";
          document.dispatchEvent(new CustomEvent("signed-out"));
          await new Promise((done) => document.addEventListener("signed-in", done, { once: true }));
          continue;
        }
        const chunk = await answer.json();
        if (answer.status === 404) { this.said.textContent = `${chunk.message}.`; this.follow.hidden = true; return; }
        if (!answer.ok) throw new Error(chunk.message);
        failures = 0;
        this.cursor = chunk.cursor;
        this.said.textContent = chunk.said;
        if (chunk.lines.length) this.add(chunk.lines, chunk.times);
        else if (chunk.ended && !this.root.dataset.goesOn) { this.follow.hidden = true; return; }
        else if (chunk.next) { this.next(chunk.next); continue; }
      } catch (error) {
        failures += 1;
        this.said.textContent = `No new lines: ${error.message || "the control plane does not answer"}. Trying again.`;
      }
      await new Promise((done) => setTimeout(done, Math.min(PAUSE * 2 ** failures, 15000)));
    }
  }
}

document.querySelectorAll("[data-log]").forEach((root) => new Reader(root));
