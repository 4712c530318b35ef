// The one dialog of the page: an answer swapped into it opens it, a yes or a cancel closes it. A press in the first moment
// was meant for what lay below it, so it does not count.
const TOO_SOON = 350;
const dialog = document.getElementById("dialog");
let openedAt = 0;

function open() {
  if (!dialog.open) { openedAt = performance.now(); dialog.showModal(); }
}

if (dialog) {
  document.addEventListener("htmx:after:swap", ({ detail }) => {
    const from = detail.ctx.sourceElement;
    if (detail.ctx.response?.status === 401) return;
    if (dialog.open && from !== dialog && dialog.contains(from)) dialog.close();
    else if (dialog.childElementCount) open();
  });
  dialog.addEventListener("click", (event) => {
    if (performance.now() - openedAt < TOO_SOON) { event.preventDefault(); event.stopImmediatePropagation(); return; }
    if (event.target === dialog || event.target.closest("[data-close]")) dialog.close();
  }, true);
  dialog.addEventListener("close", () => {
    dialog.replaceChildren();
    document.querySelectorAll("[data-topics]").forEach((region) => region.dispatchEvent(new CustomEvent("refresh")));
  });
}
