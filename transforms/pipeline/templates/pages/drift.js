document.addEventListener("DOMContentLoaded", () => {
  const rows = [...document.querySelectorAll(".matrix tbody tr")];
  const told = document.getElementById("told");
  const filter = document.getElementById("filter");
  const varying = document.getElementById("varying");

  function show() {
    const words = filter.value.trim().toLowerCase();
    for (const row of rows) {
      row.hidden = !row.dataset.rule.toLowerCase().includes(words) || (varying.checked && !("varies" in row.dataset));
    }
  }
  filter.addEventListener("input", show);
  varying.addEventListener("change", show);

  const matrix = document.querySelector(".matrix");
  matrix.parentElement.scrollLeft = matrix.scrollWidth; // the newest releases
  const tell = (event) => { const cell = event.target.closest("td"); if (cell) told.textContent = cell.dataset.told; };
  matrix.addEventListener("mouseover", tell);
  matrix.addEventListener("focusin", tell);
  for (const cell of matrix.querySelectorAll("td")) cell.tabIndex = -1;
  const first = matrix.querySelector("td");
  if (first) first.tabIndex = 0;
  matrix.addEventListener("click", (event) => event.target.closest("td")?.focus());

  matrix.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const cell = event.target.closest("td");
    if (!step || !cell) return;
    const shown = rows.filter((row) => !row.hidden);
    const row = shown[shown.indexOf(cell.parentElement) + step[0]];
    const next = row?.cells[cell.cellIndex + step[1]];
    if (next?.matches("td")) { event.preventDefault(); next.focus(); }
  });

  const openNamed = () => { const named = document.getElementById(location.hash.slice(1)); if (named) named.open = true; };
  window.addEventListener("hashchange", openNamed);
  openNamed();
});
