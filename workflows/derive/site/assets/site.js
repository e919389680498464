// Filters, search and sorting of the claims page, also of what compare.js adds to it. Their state is the URL's hash, as
// #paper=cxl&verdict=deviates&sort=distance; a hash without "=" names a claim. Every other page works without this file.
"use strict";

const FILTERS = ["paper", "lane", "verdict", "basis", "compare"];
const WAIT_MS = 150; // after the last key, before the search

function start(form) {
  const body = document.querySelector("table.claims tbody");
  const rows = [...body.rows].map((row, place) => ({ row, place, text: row.textContent.toLowerCase().replace(/\s+/g, " ") }));
  const shown = document.getElementById("shown");
  let timer = 0;

  const state = () => {
    const found = new URLSearchParams();
    for (const name of [...FILTERS, "sort", "q"]) {
      const value = form.elements[name].value.trim();
      if (value) found.set(name, value);
    }
    return found;
  };

  // Show the rows that fit the form, in its order.
  const apply = () => {
    const words = form.elements.q.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = FILTERS.filter((name) => form.elements[name].value).map((name) => [name, form.elements[name].value]);
    let count = 0;
    for (const { row, text } of rows) {
      const fits = wanted.every(([name, value]) => row.dataset[name] === value) && words.every((word) => text.includes(word));
      row.hidden = !fits;
      count += fits;
    }
    shown.value = `${count} of ${rows.length} verdicts`;
    order(form.elements.sort.value);
  };

  // Largest first; a row without a value last; equal ones as in the papers.
  let ordered = "";
  const order = (by) => {
    if (by === ordered) return;
    ordered = by;
    const key = ({ row }) => (!row.dataset[by] ? -1 : row.dataset[by] === "inf" ? Infinity : Number(row.dataset[by]));
    const compare = (a, b) => (by && key(a) !== key(b) ? (key(a) < key(b) ? 1 : -1) : a.place - b.place);
    body.append(...[...rows].sort(compare).map(({ row }) => row));
  };

  const remember = () => {
    history.replaceState(null, "", `#${state()}`);
    apply();
  };

  // Take the form's state from the hash; a hash that names a claim shows all, and goes there.
  const read = () => {
    const hash = location.hash.slice(1);
    const names = hash.includes("=") ? new URLSearchParams(hash) : new URLSearchParams();
    for (const name of [...FILTERS, "sort", "q"]) form.elements[name].value = names.get(name) ?? "";
    for (const name of [...FILTERS, "sort"]) {
      const list = form.elements[name], chosen = list.selectedOptions[0]; // none that is not offered, as of no other set
      if (!chosen || chosen.hidden || list.closest("label").hidden) list.value = "";
    }
    apply();
    if (hash && !hash.includes("=")) document.getElementById(decodeURIComponent(hash))?.scrollIntoView({ block: "center" });
  };

  form.hidden = false;
  form.addEventListener("input", (event) => {
    clearTimeout(timer);
    timer = setTimeout(remember, event.target.name === "q" ? WAIT_MS : 0);
  });
  form.addEventListener("reset", () => setTimeout(remember, 0));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("compared", () => {
    ordered = null;
    remember();
  });
  addEventListener("hashchange", read);
  read();
}

const form = document.getElementById("filters");
if (form) start(form);
