"use strict";

// Live parts ask again every two seconds, unless nobody looks or somebody is choosing rows.
setInterval(() => {
  const choosing = document.querySelector("#live input:checked, #live :focus-visible");
  if (document.visibilityState === "visible" && !choosing && window.htmx) window.htmx.trigger(document.body, "tick");
}, 1500);

// While no answer comes, what is shown stays, with a note. Another page instead of the answer is the login: the session has ended.
function note(away) { document.getElementById("away").hidden = !away; }
for (const name of ["htmx:sendError", "htmx:responseError"]) document.addEventListener(name, () => note(true));
document.addEventListener("htmx:beforeSwap", (event) => {
  const answer = event.detail.xhr;
  if (new URL(answer.responseURL).pathname !== location.pathname) {
    event.detail.shouldSwap = false;
    location.reload();
  } else if (answer.status < 400) note(false);
});

// Times are written in the server's zone; here they become the viewer's. Output is shown at its end, unless somebody scrolled up.
const left = new Map();
document.addEventListener("scroll", (event) => {
  const box = event.target;
  if (box instanceof HTMLPreElement) left.set(box.getAttribute("aria-label"), box.scrollTop + box.clientHeight < box.scrollHeight - 8 ? box.scrollTop : null);
}, true);
function adapt(root) {
  for (const time of root.querySelectorAll("time[datetime]")) {
    time.title = time.getAttribute("datetime");
    time.textContent = new Date(time.title).toLocaleString(document.documentElement.lang);
  }
  for (const box of root.querySelectorAll("pre[data-follow]")) box.scrollTop = left.get(box.getAttribute("aria-label")) ?? box.scrollHeight;
}
for (const field of document.querySelectorAll("[data-zone]")) field.value = Intl.DateTimeFormat().resolvedOptions().timeZone;
adapt(document);
document.addEventListener("htmx:afterSettle", () => adapt(document));

// A form may have a question that is to be asked before it is sent; without this script the server asks it.
document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  const asked = button?.form?.elements;
  const question = asked?.namedItem(`question_${button.value}`) ?? asked?.namedItem("question");
  if (!question) return;
  question.disabled = window.confirm(question.value);
  if (!question.disabled) event.preventDefault();
});
