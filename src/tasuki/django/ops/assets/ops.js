"use strict";

// Live parts ask again every two seconds, unless nobody looks or a button of the mouse is down: what is pressed stays in its place.
let isPressed = false;
for (const name of ["pointerdown", "pointermove", "pointerup", "pointercancel"])
  document.addEventListener(name, (event) => { isPressed = event.buttons === 1; }, true);
setInterval(() => {
  const live = document.querySelector("#live[hx-get]");
  if (live && document.visibilityState === "visible" && !isPressed) window.htmx?.trigger(live, "tick");
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
  if (isPressed) event.detail.shouldSwap = false;
});

// Times are written in the server's zone; here they become the viewer's.
function adapt(root) {
  for (const time of root.querySelectorAll("time[datetime]")) {
    time.title = time.getAttribute("datetime");
    time.textContent = new Date(time.title).toLocaleString(document.documentElement.lang);
  }
}
for (const field of document.querySelectorAll("[data-zone]")) field.value = Intl.DateTimeFormat().resolvedOptions().timeZone;
adapt(document);

// Output is shown at its end, unless somebody scrolled up or marks some of it.
function isRead(box) {
  const marked = getSelection();
  return box.scrollTop + box.clientHeight < box.scrollHeight - 8 || (!marked.isCollapsed && marked.containsNode(box, true));
}
function follow(boxes) { for (const box of boxes) box.scrollTop = box.scrollHeight; }
follow(document.querySelectorAll("pre[data-follow]"));

// An answer changes only what differs in it: elements that stay keep focus, selection, scroll position, ticks and what was opened.
function update(shown, answer) {
  if (shown.isEqualNode(answer)) return;
  if (shown.nodeType !== Node.ELEMENT_NODE) { rewrite(shown, answer.data); return; }
  for (const name of shown.getAttributeNames()) if (name !== "open" && !answer.hasAttribute(name)) shown.removeAttribute(name);
  for (const { name, value } of answer.attributes) if (shown.getAttribute(name) !== value) shown.setAttribute(name, value);
  const wanted = new Set([...answer.childNodes].map(keyOf));
  const ticked = new Set();
  for (const node of [...shown.childNodes]) {
    if (wanted.has(keyOf(node))) continue;
    if (node.querySelector?.("input:checked")) ticked.add(node);
    else node.remove();
  }
  let next = shown.firstChild;
  for (const node of [...answer.childNodes]) {
    while (ticked.has(next)) next = next.nextSibling;
    let same = next;
    while (same && (ticked.has(same) || keyOf(same) !== keyOf(node))) same = same.nextSibling;
    if (same) update(same, node);
    if (same === next && same) next = next.nextSibling;
    else shown.insertBefore(same ?? node, next);
  }
  while (next) {
    const last = next;
    next = next.nextSibling;
    if (!ticked.has(last)) last.remove();
  }
}
// An alert whose numbers alone change is the same one.
function keyOf(node) {
  if (node.nodeType !== Node.ELEMENT_NODE) return node.nodeName;
  const own = node.id || node.dataset.key || (node.matches(".problem") ? node.textContent.replace(/\d+/g, "") : "");
  return `${node.nodeName} ${own}`;
}
// Text that was added at the end, or left out at the beginning, leaves the rest and what is marked in it alone.
function rewrite(node, text) {
  const left = node.data.indexOf(text.slice(0, 256));
  if (left < 0 || !text.startsWith(node.data.slice(left))) { node.data = text; return; }
  const box = node.parentElement, height = box.scrollHeight;
  node.deleteData(0, left);
  if (left) box.scrollTop -= height - box.scrollHeight;
  node.appendData(text.slice(node.length));
}
window.htmx?.defineExtension("update", {
  handleSwap(_style, target, fragment) {
    const read = new Set([...target.querySelectorAll("pre[data-follow]")].filter(isRead));
    adapt(fragment);
    update(target, fragment.firstElementChild);
    follow([...target.querySelectorAll("pre[data-follow]")].filter((box) => !read.has(box)));
    return true;
  },
});

// A form may have a question that is to be asked before it is sent; without this script the server asks it.
document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  const asked = button?.form?.elements;
  const question = asked?.namedItem(`question_${button.value}`) ?? asked?.namedItem("question");
  if (!question) return;
  question.disabled = window.confirm(question.value);
  if (!question.disabled) event.preventDefault();
});
