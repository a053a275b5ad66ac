"use strict";
const root = document.documentElement;
const THEMES = ["auto", "light", "dark"];
let theme = "auto";
try { theme = localStorage.getItem("ucm-theme") || "auto"; } catch { /* a page from disk may have no storage */ }

function showTheme() {
  if (theme === "auto") delete root.dataset.theme; else root.dataset.theme = theme;
  const name = document.getElementById("theme-name");
  if (name) name.textContent = theme;
}

function nextTheme() {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  try { localStorage.setItem("ucm-theme", theme); } catch { /* as above */ }
  showTheme();
}

showTheme();
document.addEventListener("DOMContentLoaded", () => {
  showTheme();
  document.getElementById("theme").addEventListener("click", nextTheme);
});
