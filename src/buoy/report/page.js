"use strict";
(() => {
  const root = document.documentElement;
  const prefers = window.matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");

  // Every chart model carries both of its coats as a tag.
  const dress = (theme) => {
    for (const doc of window.Bokeh?.documents ?? []) {
      for (const model of doc.all_models) {
        for (const tag of model.tags ?? []) {
          if (tag instanceof Map && tag.has(theme)) {
            model.setv(Object.fromEntries(tag.get(theme)));
          } else if (tag !== null && typeof tag === "object" && tag[theme]) {
            model.setv(tag[theme]);
          }
        }
      }
    }
  };
  const wear = (theme) => {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${button.textContent} colours`);
    dress(theme);
  };
  let chosen = null;
  const current = () => chosen ?? (prefers.matches ? "dark" : "light");
  button.addEventListener("click", () => {
    chosen = current() === "dark" ? "light" : "dark";
    wear(chosen);
  });
  prefers.addEventListener("change", () => wear(current()));
  wear(current());

  // Charts come when the page is there; a finger scrolls it and does not zoom.
  const ready = () => {
    const docs = window.Bokeh?.documents ?? [];
    if (docs.length === 0 || !docs.every((doc) => doc.is_idle)) {
      window.setTimeout(ready, 50);
      return;
    }
    wear(current());
    if (window.matchMedia("(pointer: coarse)").matches) {
      for (const doc of docs) {
        for (const model of doc.all_models) {
          if (model.type === "BoxZoomTool") { model.active = false; }
        }
      }
    }
    root.dataset.ready = "yes";
  };
  window.addEventListener("load", ready);

  // Tables: a click on a heading sorts, a second one turns the order round.
  const key = (row, column) => {
    const cell = row.cells[column];
    const value = cell.dataset.value ?? cell.textContent.trim();
    const number = Number(value);
    return value !== "" && !Number.isNaN(number) ? number : value;
  };
  const order = (a, b) => {
    if (typeof a === typeof b) { return a < b ? -1 : Number(a > b); }
    return typeof a === "number" ? 1 : -1;
  };
  for (const heading of document.querySelectorAll("th > button")) {
    heading.addEventListener("click", () => {
      const cell = heading.parentElement;
      const table = cell.closest("table");
      const column = cell.cellIndex;
      const first = cell.classList.contains("text") ? "ascending" : "descending";
      const other = first === "ascending" ? "descending" : "ascending";
      const way = cell.getAttribute("aria-sort") === first ? other : first;
      for (const th of table.tHead.rows[0].cells) { th.removeAttribute("aria-sort"); }
      cell.setAttribute("aria-sort", way);
      const turn = way === "ascending" ? 1 : -1;
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => turn * order(key(a, column), key(b, column)));
      table.tBodies[0].append(...rows);
    });
  }
})();
