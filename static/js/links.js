// Moves the ends of the link's lines to the cards they belong to: the server draws for cards of one height, real ones differ.
const SPREAD = 9;

function middle(card, top) {
  const box = card.getBoundingClientRect();
  return box.top - top + Math.min(box.height / 2, 46);
}

function offset(index, of) {
  return of < 2 ? 0 : (index - (of - 1) / 2) * Math.min(SPREAD, 44 / of);
}

function draw(svg) {
  const box = svg.getBoundingClientRect();
  const lines = [...svg.querySelectorAll("path[data-prefill]")];
  if (!box.width || !lines.length) return;
  const at = new Map();
  for (const line of lines) {
    for (const id of [line.dataset.prefill, line.dataset.decode]) {
      const card = document.getElementById(`card-${id}`);
      if (card && !at.has(id)) at.set(id, { y: middle(card, box.top), lines: [] });
    }
  }
  for (const line of lines) {
    at.get(line.dataset.prefill)?.lines.push([line, line.dataset.decode]);
    at.get(line.dataset.decode)?.lines.push([line, line.dataset.prefill]);
  }
  for (const end of at.values()) end.lines.sort((a, b) => (at.get(a[1])?.y ?? 0) - (at.get(b[1])?.y ?? 0));
  svg.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
  for (const line of lines) {
    const from = at.get(line.dataset.prefill);
    const to = at.get(line.dataset.decode);
    if (!from || !to) continue;
    const y1 = from.y + offset(from.lines.findIndex(([own]) => own === line), from.lines.length);
    const y2 = to.y + offset(to.lines.findIndex(([own]) => own === line), to.lines.length);
    const half = box.width / 2;
    line.setAttribute("d", `M0 ${y1}C${half} ${y1} ${half} ${y2} ${box.width} ${y2}`);
  }
}

function drawAll() {
  document.querySelectorAll("svg.lines").forEach(draw);
}

drawAll();
document.fonts?.ready.then(drawAll);
addEventListener("resize", drawAll);
document.addEventListener("htmx:after:swap", drawAll);
document.addEventListener("toggle", drawAll, true);
