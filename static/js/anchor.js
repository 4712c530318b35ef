// What a person points at or has focused stays where it is: when an answer changes the page above it, the page scrolls by the
// difference; where it cannot scroll, the frame grows by it.
const CONTROLS = "a, button, input, select, textarea, summary";
const root = document.documentElement;
let pointing = true;
const held = new Map();

addEventListener("pointermove", () => { pointing = true; }, { passive: true });
addEventListener("keydown", () => { pointing = false; }, { passive: true });

function control() {
  const main = document.getElementById("main");
  if (!main) return null;
  const hovered = [...main.querySelectorAll(":hover")].pop()?.closest(CONTROLS);
  const focused = main.contains(document.activeElement) && document.activeElement.matches(CONTROLS) ? document.activeElement : null;
  return pointing ? (hovered ?? focused) : (focused ?? hovered);
}

function top(element) { return element.getBoundingClientRect().top; }

document.addEventListener("htmx:before:swap", ({ detail }) => {
  const element = control();
  if (!element) return;
  held.set(detail.ctx, { element, id: element.id, top: top(element) });
  root.style.overflowAnchor = "none";  // the browser's own anchor would scroll a second time
});

function hold({ element: before, id, top: wanted }) {
  const element = before.isConnected ? before : document.getElementById(id);
  if (!element) return;
  const frame = document.getElementById("main");
  scrollBy({ top: top(element) - wanted, behavior: "instant" });
  const rest = top(element) - wanted;
  if (rest > 0.5) {
    frame.style.minHeight = `${Math.ceil(innerHeight + scrollY + rest)}px`;
    scrollBy({ top: rest, behavior: "instant" });
  } else if (rest < -0.5) frame.style.paddingTop = `${parseFloat(getComputedStyle(frame).paddingTop) - rest}px`;
}

document.addEventListener("htmx:before:settle", () => held.forEach(hold));
document.addEventListener("htmx:after:swap", ({ detail }) => {
  const mark = held.get(detail.ctx);
  if (!mark) return;
  hold(mark);
  held.delete(detail.ctx);
  if (!held.size) requestAnimationFrame(() => requestAnimationFrame(() => { root.style.overflowAnchor = ""; }));
});
