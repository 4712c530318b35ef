// The dark/light button. The choice is remembered; without one the system decides.
const dark = matchMedia("(prefers-color-scheme: dark)");

function current() {
  return document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
}

document.addEventListener("click", (event) => {
  if (!event.target.closest?.("[data-theme-toggle]")) return;
  const next = current() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  localStorage.setItem("theme", next);
});
