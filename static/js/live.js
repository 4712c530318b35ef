// The live channel. The server says *that* something changed ("deployment:smollm2"); regions that name the topic in
// data-topics fetch themselves again (a topic ending in ":" stands for all that begin so). Regions also refresh every
// data-every seconds for their figures; while the socket is down, every 5 s.
const FALLBACK = 5;
const LONGEST_WAIT = 15000;
const SIGNED_OUT = 4401;

const state = document.getElementById("live-state");
const due = new Map();
let failures = 0;
let socket = null;
let signedOut = false;

function regions() {
  return document.querySelectorAll("[data-topics]");
}

function concerns(region, topic) {
  return region.dataset.topics.split(" ").some((own) => own === topic || (own.endsWith(":") && topic.startsWith(own)));
}

function refresh(region, cause) {
  if (!region.isConnected) return;
  region.dataset.cause = cause;
  region.dataset.refreshed = String(performance.now());
  region.dispatchEvent(new CustomEvent("refresh"));
}

function soon(region, cause) {
  if (due.has(region)) return;
  due.set(region, setTimeout(() => { due.delete(region); refresh(region, cause); }, 120));
}

function show(name, detail) {
  if (!state) return;
  state.dataset.state = name;
  if (detail) state.querySelector(".when-polling .detail").textContent = detail;
}

function connect() {
  const scheme = location.protocol === "https:" ? "wss:" : "ws:";
  socket = new WebSocket(`${scheme}//${location.host}/live/`);
  socket.addEventListener("open", () => {
    const again = failures > 0;
    failures = 0;
    show("live");
    if (again) regions().forEach((region) => soon(region, "reconnect"));
  });
  socket.addEventListener("message", (event) => {
    const { topic } = JSON.parse(event.data);
    for (const region of regions()) if (concerns(region, topic)) soon(region, `socket ${topic}`);
  });
  socket.addEventListener("close", (event) => {
    if (event.code === SIGNED_OUT || signedOut) { document.dispatchEvent(new CustomEvent("signed-out")); return; }
    failures += 1;
    show("polling", "Reconnecting · every 5 s");
    const wait = Math.min(500 * 2 ** failures, LONGEST_WAIT) * (0.7 + Math.random() * 0.6);
    setTimeout(connect, wait);
  });
}

function beat() {
  if (document.hidden || signedOut) return;
  const now = performance.now();
  const down = socket?.readyState !== WebSocket.OPEN;
  for (const region of regions()) {
    const every = (down ? FALLBACK : Number(region.dataset.every || 0)) * 1000;
    if (every && now - Number(region.dataset.refreshed || 0) >= every) refresh(region, "beat");
  }
}

if ("live" in document.body.dataset) {
  connect();
  setInterval(beat, 1000);
  document.addEventListener("signed-out", () => {
    if (signedOut) return;
    signedOut = true;
    show("signed-out");
    socket?.close();
  });
  document.addEventListener("signed-in", () => {
    signedOut = false;
    failures = 0;
    connect();
    regions().forEach((region) => soon(region, "signed in"));
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) regions().forEach((region) => soon(region, "shown"));
  });
}

// A failed request is said once, and unsaid by the next that works.
function toast(text) {
  let element = document.querySelector(".toast");
  if (!text) { element?.remove(); return; }
  if (!element) {
    element = document.createElement("div");
    element.className = "toast";
    element.setAttribute("role", "status");
    document.body.append(element);
  }
  element.textContent = text;
}

document.addEventListener("htmx:response:error", (event) => {
  const status = event.detail.ctx.response.status;
  if (status >= 500) toast(`The control plane answered ${status}. What you see may be old.`);
});
document.addEventListener("htmx:error", (event) => {
  if (event.detail.ctx) toast("The control plane does not answer. What you see may be old.");
});
document.addEventListener("unanswered", () => toast("The control plane does not answer. Nothing was sent; what you typed is still here."));
document.addEventListener("htmx:after:swap", () => toast(""));
document.addEventListener("htmx:config:request", ({ detail }) => {  // what somebody does next answers the last notice
  if (detail.ctx.sourceEvent?.type !== "refresh") document.getElementById("notices")?.replaceChildren();
});
