"use strict";

// Live parts ask again every two seconds, unless nobody looks or somebody is choosing rows.
setInterval(() => {
  const choosing = document.querySelector("#live input:checked, #live :focus");
  if (document.visibilityState === "visible" && !choosing && window.htmx) window.htmx.trigger(document.body, "tick");
}, 2000);

// Times are written in the project's zone; here they become the viewer's.
function localTimes(root) {
  for (const time of root.querySelectorAll("time[datetime]")) {
    time.title = time.getAttribute("datetime");
    time.textContent = new Date(time.title).toLocaleString(document.documentElement.lang);
  }
}
localTimes(document);
document.addEventListener("htmx:afterSettle", () => localTimes(document));

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-confirm]");
  if (button && !window.confirm(button.dataset.confirm)) event.preventDefault();
});
