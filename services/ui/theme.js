// Runs before the page is drawn, so that no other theme flashes: the chosen one, or else the system's.
"use strict";
{
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    let chosen = null;
    try {
      chosen = localStorage.getItem("pagekeeper-theme");
    } catch {
      // The browser keeps nothing for this page: the system's theme holds.
    }
    const known = chosen === "light" || chosen === "dark";
    document.documentElement.dataset.theme = known ? chosen : dark.matches ? "dark" : "light";
  };
  apply();
  dark.addEventListener("change", apply);
}
