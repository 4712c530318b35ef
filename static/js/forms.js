// Small help for forms: ± buttons beside a number, copying a command, a delete button that waits for the typed name.
document.addEventListener("click", async (event) => {
  const step = event.target.closest?.("[data-step]");
  if (step) {
    const input = document.getElementById(step.dataset.for);
    const value = Number(input.value || 0) + Number(step.dataset.step);
    input.value = String(Math.min(Math.max(value, Number(input.min || 0)), Number(input.max || Infinity)));
    input.dispatchEvent(new Event("input", { bubbles: true }));
    return;
  }
  const copy = event.target.closest?.("[data-copy]");
  if (copy) {
    const source = document.getElementById(copy.dataset.copy);
    const text = source.value ?? source.textContent;
    const said = copy.textContent;
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch {
      if (source.select) source.select();
      else getSelection().selectAllChildren(source);
      copy.textContent = "Selected: press Ctrl-C";
    }
    setTimeout(() => { copy.textContent = said; }, 2000);
  }
});

function confirmed(input) {
  const button = input.form.querySelector("button.danger");
  button.disabled = input.value.trim() !== input.dataset.confirms;
  if (!input.disabled) button.title = button.disabled ? "Type the name first" : "";
}

document.querySelectorAll("[data-confirms]").forEach(confirmed);
document.addEventListener("input", (event) => {
  if (event.target.dataset?.confirms !== undefined) confirmed(event.target);
});

// A form that is on its way is not sent again. When it was done, its next sending is another one: it gets a token of its own.
function release(form) {
  delete form.dataset.sending;
  form.querySelectorAll("[data-waits]").forEach((button) => { button.removeAttribute("aria-disabled"); delete button.dataset.waits; });
}

function token() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

document.addEventListener("submit", (event) => {
  const form = event.target;
  if (form.getAttribute("method") !== "post" || form.matches("[data-pool-size]")) return;
  if ("sending" in form.dataset) { event.preventDefault(); event.stopImmediatePropagation(); return; }
  form.dataset.sending = "";
  for (const button of form.querySelectorAll("button:not([type=button]):not([aria-disabled])")) {
    button.setAttribute("aria-disabled", "true");
    button.dataset.waits = "";
  }
}, true);
document.addEventListener("htmx:finally:request", ({ detail: { ctx } }) => {
  const form = ctx.request.form;
  if (!form || ctx.response?.headers.get("HX-Redirect")) return;
  release(form);
  const status = ctx.response?.status ?? 0;
  if (!status || (status >= 400 && status !== 409)) return;  // 409: what its token stands for is another thing
  const field = form.querySelector("[name=once]");
  if (!field || ctx.hx?.retarget === "#dialog") return;
  field.value = token();
});
addEventListener("pageshow", () => { document.querySelectorAll("form[data-sending]").forEach(release); });

document.addEventListener("change", (event) => {
  if (event.target.matches?.("[data-submits]")) event.target.form.requestSubmit();
});
