"use strict";
// Tables sort themselves by a click on a heading.
const value = (row, column) => {
  const cell = row.cells[column];
  if (!cell) return NaN;
  const text = cell.dataset.value ?? cell.textContent.trim();
  return text === "" || isNaN(text) ? text : Number(text);
};
const compare = (a, b) => {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), undefined, { numeric: true });
};
const sortable = table => table.tHead.querySelectorAll("th").forEach((head, column) => head.addEventListener("click", () => {
  const ascending = head.getAttribute("aria-sort") !== "ascending";
  table.tHead.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const keyed = [...table.tBodies[0].rows].map(row => [value(row, column), row]);
  const missing = key => key === "" || Number.isNaN(key);
  keyed
    .sort(([a], [b]) => missing(a) - missing(b) || (ascending ? 1 : -1) * compare(a, b))
    .forEach(([, row]) => table.tBodies[0].append(row));
}));
document.querySelectorAll("table").forEach(sortable);
