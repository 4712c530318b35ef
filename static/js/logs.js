// The log reader: asks for what is new from its cursor on, one long request after the other, and keeps the newest lines.
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
    this.filter = document.querySelector("[data-log-filter]");
    this.follow = root.querySelector("[data-log-follow]");
    this.cursor = root.dataset.cursor;
    this.following = true;
    this.lines.querySelectorAll("div").forEach((row) => this.dress(row));
    this.toEnd();
    this.lines.addEventListener("scroll", () => this.set(this.atEnd()));
    this.follow.addEventListener("click", () => { this.set(!this.following); if (this.following) this.toEnd(); });
    this.filter?.addEventListener("input", () => { this.lines.querySelectorAll("div").forEach((row) => this.sift(row)); });
    if (root.dataset.more) this.run();
  }

  atEnd() { return this.lines.scrollHeight - this.lines.scrollTop - this.lines.clientHeight < 24; }
  toEnd() { this.lines.scrollTop = this.lines.scrollHeight; }

  set(following) {
    this.following = following;
    this.follow.setAttribute("aria-pressed", String(following));
    this.follow.textContent = following ? "Following" : "Follow";
  }

  dress(row) {
    const name = tone(row.textContent);
    if (name) row.classList.add(name);
  }

  sift(row) {
    const wanted = this.filter?.value.toLowerCase() ?? "";
    row.hidden = wanted !== "" && !row.textContent.toLowerCase().includes(wanted);
  }

  add(lines) {
    const rows = document.createDocumentFragment();
    for (const line of lines) {
      const row = document.createElement("div");
      row.textContent = line || " ";
      this.dress(row);
      this.sift(row);
      rows.append(row);
    }
    this.lines.querySelector(".faint")?.remove();
    this.lines.append(rows);
    while (this.lines.childElementCount > MOST) this.lines.firstElementChild.remove();
    if (this.following) this.toEnd();
  }

  async run() {
    let failures = 0;
    while (this.root.isConnected) {
      try {
        const answer = await fetch(`${this.root.dataset.more}&cursor=${encodeURIComponent(this.cursor)}`, { headers: { Accept: "application/json" } });
        if (answer.redirected) { location.reload(); return; }
        const chunk = await answer.json();
        if (!answer.ok) throw new Error(chunk.message);
        failures = 0;
        this.cursor = chunk.cursor;
        this.said.textContent = chunk.said;
        if (chunk.lines.length) this.add(chunk.lines);
        if (chunk.ended && !chunk.lines.length) { this.follow.hidden = true; return; }
      } catch (error) {
        failures += 1;
        this.said.textContent = `No new lines: ${error.message || "the control plane does not answer"}. Trying again.`;
      }
      await new Promise((done) => setTimeout(done, Math.min(PAUSE * 2 ** failures, 15000)));
    }
  }
}

document.querySelectorAll("[data-log]").forEach((root) => new Reader(root));
