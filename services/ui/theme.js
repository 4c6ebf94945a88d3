// Runs before the page is drawn, so that a chosen theme does not flash. Without a choice the system's holds.
"use strict";
try {
  const chosen = localStorage.getItem("pagekeeper-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  document.documentElement.dataset.storage = "none"; // the browser keeps nothing for this page
}
