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

document.addEventListener("change", (event) => {
  if (event.target.matches?.("[data-submits]")) event.target.form.requestSubmit();
});
