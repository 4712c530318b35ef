// The ± of a pool. Each press is one request, from the number that the reader saw to the next one; they are sent in order
// (hx-sync: queue all), and the number shown goes ahead of the answers until the last has come.
const waiting = new Map();

function count(form) { return form.querySelector("[data-wanted]"); }

function paint(form, number) {
  count(form).textContent = String(number);
  form.querySelector("[data-by='-1']").setAttribute("aria-disabled", String(number === 0));
}

document.addEventListener("htmx:config:request", (event) => {
  const { ctx } = event.detail;
  const form = ctx.sourceElement;
  if (!form.matches?.("[data-pool-size]")) return;
  const seen = Number(count(form).textContent);
  const number = seen + Number(ctx.request.submitter?.dataset.by);
  if (!(number >= 0)) { event.preventDefault(); return; }
  ctx.request.body.set("seen", String(seen));
  ctx.request.body.set("replicas", String(number));
  if (!waiting.has(form.id)) waiting.set(form.id, { of: new Set(), number });
  const pool = waiting.get(form.id);
  pool.of.add(ctx);
  pool.number = number;
  paint(form, number);
});

function answered(event) {
  const { ctx } = event.detail;
  for (const [id, pool] of waiting) if (pool.of.delete(ctx) && !pool.of.size) waiting.delete(id);
}

document.addEventListener("htmx:after:request", answered);
document.addEventListener("htmx:finally:request", (event) => {
  answered(event);
  const form = event.detail.ctx.sourceElement;
  const failed = !event.detail.ctx.response || event.detail.ctx.response.status >= 400;
  if (!form.matches?.("[data-pool-size]") || !failed) return;
  paint(form, Number(form.elements.seen.value));  // as the server last said
  form.closest("[data-topics]")?.dispatchEvent(new CustomEvent("refresh"));
});
function ahead() {
  for (const [id, pool] of waiting) {
    const form = document.getElementById(id);
    if (form) paint(form, pool.number);
  }
}

document.addEventListener("htmx:before:settle", ahead);  // before the older number is drawn
document.addEventListener("htmx:after:swap", ahead);
