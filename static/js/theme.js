// Applies the remembered theme before the first paint. Loaded without `defer` for that reason; nothing else lives here.
(() => {
  const chosen = localStorage.getItem("theme");
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
})();
