// Ages go on between two answers of the server, and clock times are shown in the reader's zone.
// An age is counted from the server's own figure by this browser's monotonic clock: the two machines' clocks never meet.
const seen = new WeakMap();
const STEPS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

export function ageText(seconds) {
  seconds = Math.max(seconds, 0);
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  for (const [size, unit] of STEPS) if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
  return `${Math.round(seconds)} s`;
}

function tick() {
  const now = performance.now() / 1000;
  for (const element of document.querySelectorAll("time[data-age]")) {
    const key = `${element.dateTime} ${element.dataset.age}`;
    let mark = seen.get(element);
    if (!mark || mark.key !== key) seen.set(element, (mark = { key, at: now, from: Number(element.dataset.age) }));
    const text = ageText(mark.from + now - mark.at);
    if (element.textContent !== text) element.textContent = text;
  }
}

function zones() {
  for (const element of document.querySelectorAll("time[data-clock]")) {
    const at = new Date(element.dateTime);
    const today = at.toDateString() === new Date().toDateString();
    const text = at.toLocaleString(undefined, today ? { timeStyle: "short" } : { dateStyle: "medium", timeStyle: "short" });
    if (element.textContent !== text) element.textContent = text;
  }
}

tick();
zones();
setInterval(tick, 1000);
document.addEventListener("htmx:after:swap", () => { tick(); zones(); });
