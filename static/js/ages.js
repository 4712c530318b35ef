// Ages go on, and times left run down, between two answers of the server; clock times are shown in the reader's zone.
// An age is counted from the server's own figure by this browser's monotonic clock: the two machines' clocks never meet.
const seen = new WeakMap();
const STEPS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

export function ageText(seconds) {
  seconds = Math.max(seconds, 0);
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  for (const [size, unit] of STEPS) if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
  return `${Math.round(seconds)} s`;
}

export function leftText(seconds) {
  const whole = Math.max(Math.ceil(seconds), 0);
  return whole < 60 ? `${whole} s` : `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
}

// Seconds since the server wrote this figure into the element.
function passed(element, figure, now) {
  const key = `${element.dateTime} ${figure}`;
  let mark = seen.get(element);
  if (!mark || mark.key !== key) seen.set(element, (mark = { key, at: now }));
  return now - mark.at;
}

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function tick() {
  const now = performance.now() / 1000;
  for (const element of document.querySelectorAll("time[data-age]")) {
    const { age } = element.dataset;
    say(element, ageText(Number(age) + passed(element, age, now)));
  }
  for (const element of document.querySelectorAll("time[data-left]")) {
    const { left, before, over } = element.dataset;
    const rest = Number(left) - passed(element, left, now);
    say(element, rest > 0 ? `${before} ${leftText(rest)}.` : over);
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
