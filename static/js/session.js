// When the session has ended: the reader signs in over the page, and what was sent goes out again. Nothing typed is lost.
// Every form is sent with the newest CSRF token, as a login in another tab makes those in the page old.
const dialog = document.getElementById("sign-in");
const UNAUTHENTICATED = 401;
const AS_PART = { "HX-Request": "true" };
let asked = null;

function csrf() { return /(?:^|; )csrftoken=([^;]+)/.exec(document.cookie)?.[1] ?? ""; }

// The pages' other parts listen for these: "signed-out" stops what is live, "signed-in" starts it again.
function tell(name) { document.dispatchEvent(new CustomEvent(name)); }

function fill(text) {
  dialog.innerHTML = text;
  const name = dialog.querySelector("[name=username]");
  if (!name.value) name.value = dialog.dataset.user;
  dialog.querySelector("[name=password]").focus();
}

async function send(form) {
  const body = new URLSearchParams(new FormData(form));
  body.set("csrfmiddlewaretoken", csrf() || body.get("csrfmiddlewaretoken"));
  const answer = await fetch(form.action, { method: "POST", body, headers: AS_PART });
  if (answer.status !== 204) fill(await answer.text());
  else if (body.get("username") !== dialog.dataset.user) location.reload();  // somebody else: what was typed is not theirs
  else dialog.close("signed-in");
}

// Resolves to whether the reader has signed in.
export function signIn() {
  asked ??= (async () => {
    const answer = await fetch(dialog.dataset.login, { headers: AS_PART });
    if (answer.status !== 204) {
      const closed = new Promise((done) => dialog.addEventListener("close", done, { once: true }));
      dialog.returnValue = "";
      dialog.showModal();
      fill(await answer.text());
      await closed;
      dialog.replaceChildren();
      if (dialog.returnValue !== "signed-in") return false;
    }
    tell("signed-in");
    return true;
  })().finally(() => { asked = null; });
  return asked;
}

if (dialog) {
  dialog.addEventListener("submit", (event) => {
    event.preventDefault();
    event.stopImmediatePropagation();
    send(event.target).catch(() => { event.target.querySelector("p").textContent = "The control plane does not answer. Try again."; });
  });
  dialog.addEventListener("click", (event) => { if (event.target.closest("[data-close]")) dialog.close(); });
  document.addEventListener("click", (event) => { if (event.target.closest?.("[data-sign-in]")) signIn().catch(() => {}); });
}

// What htmx sends: a form goes out again after the login; a region that refreshes itself only says that it is old.
document.addEventListener("htmx:response:error", async ({ detail: { ctx } }) => {
  if (ctx.response.status !== UNAUTHENTICATED) return;
  tell("signed-out");
  const form = ctx.request.form;
  if (ctx.sourceEvent?.type === "refresh" || !form) return;
  if (await signIn().catch(() => false) && form.isConnected && !form.matches("[data-pool-size]")) form.requestSubmit(ctx.request.submitter);
});

// What the browser sends by itself would take the page away: the session is asked for first.
async function check(form, submitter) {
  try {
    const answer = await fetch(document.querySelector("[data-session]").dataset.session, { headers: AS_PART });
    if (answer.status === UNAUTHENTICATED) {
      tell("signed-out");
      if (!(await signIn())) { tell("form-waits"); return; }
    }
  } catch {
    tell("unanswered");
    return;
  }
  form.dataset.checked = "";
  form.requestSubmit(submitter);
}

document.addEventListener("submit", (event) => {
  const form = event.target;
  if (form.getAttribute("method") !== "post" || dialog?.contains(form)) return;
  const field = form.querySelector("[name=csrfmiddlewaretoken]");
  if (field && csrf()) field.value = csrf();
  if (!dialog || form.hasAttribute("hx-post") || "leaves" in form.dataset) return;
  if ("checked" in form.dataset) { delete form.dataset.checked; return; }
  event.preventDefault();
  event.stopImmediatePropagation();
  check(form, event.submitter);
}, true);
