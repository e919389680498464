// The claims page beside another claims.csv: one that the page was made with, or one that is chosen here. A chosen file is read
// by the browser and goes nowhere. Each row gets data-compare, which the filters of site.js read, and three more cells.
"use strict";

const COLUMNS = ["claim_id", "lane", "verdict", "value", "expected", "unit"];
const LARGEST = 20e6; // bytes; the set of all papers has below one million

// The records of comma-separated text; an error where a quote is not closed.
function parseCsv(text) {
  const records = [];
  let record = [], cell = "", quoted = false;
  const endRecord = () => {
    record.push(cell);
    if (record.length > 1 || record[0]) records.push(record);
    record = [];
    cell = "";
  };
  for (let at = 0; at < text.length; at++) {
    const sign = text[at];
    if (quoted) {
      if (sign !== '"') cell += sign;
      else if (text[at + 1] === '"') cell += text[++at];
      else quoted = false;
    } else if (sign === '"' && !cell) quoted = true;
    else if (sign === ",") {
      record.push(cell);
      cell = "";
    } else if (sign === "\n") endRecord();
    else if (sign !== "\r") cell += sign;
  }
  if (quoted) throw new Error("no claims.csv: a quote is not closed");
  endRecord();
  return records;
}

// The lines of a claims.csv, checked as workflows/derive/site/against.py checks them.
function readClaims(text, lanes, verdicts) {
  const [head = [], ...records] = parseCsv(text.replace(/^\uFEFF/, ""));
  const missing = COLUMNS.find((name) => !head.includes(name));
  if (missing) throw new Error(`no claims.csv: column '${missing}' is missing`);
  if (!records.length) throw new Error("a claims.csv without a claim");
  const seen = new Set();
  return records.map((record, place) => {
    const line = Object.fromEntries(COLUMNS.map((name) => [name, record[head.indexOf(name)] ?? ""]));
    const wrong = (what) => { throw new Error(`claim ${place + 1}: ${what}`); };
    if (!line.claim_id) wrong("it has no id");
    if (!lanes.includes(line.lane)) wrong(`unknown lane '${line.lane}'; lanes are ${lanes.join(", ")}`);
    if (!verdicts.includes(line.verdict)) wrong(`unknown verdict '${line.verdict}'; verdicts are ${verdicts.join(", ")}`);
    if (line.value && !Number.isFinite(Number(line.value))) wrong(`value '${line.value}' is no number`);
    const key = `${line.claim_id}.${line.lane}`;
    if (seen.has(key)) wrong(`${line.claim_id} stands twice in lane ${line.lane}`);
    seen.add(key);
    return line;
  });
}

// Four digits, and all of a larger number, as the page's own values.
const valueText = (value) =>
  Math.abs(value) >= 1000 ? value.toLocaleString("en-US", { maximumFractionDigits: 0 }) : String(Number(value.toPrecision(4)));
const withUnit = (text, unit) => `${text} ${unit}`.trim();

// Here less there, in the claim's unit and as a share of what is there; a percentage's in points.
function difference(here, there, unit) {
  const off = here - there;
  if (!off) return { text: "0", share: 0 };
  const sign = off > 0 ? "+" : "−";
  const share = there ? Math.abs(off / there) : Infinity;
  if (unit.startsWith("%")) return { text: `${sign}${valueText(Math.abs(off))} points`, share };
  const part = there ? `${sign}${Number((100 * share).toPrecision(2))} %` : "";
  return { text: withUnit(`${sign}${valueText(Math.abs(off))}`, unit), part, share };
}

function element(tag, text = "", given = {}) {
  const made = Object.assign(document.createElement(tag), given);
  made.textContent = text;
  return made;
}

function badge(verdict) {
  return element("span", verdict, { className: `badge ${verdict.replaceAll(" ", "-")}` });
}

function cell(label, ...parts) {
  const made = element("td", "", { className: "added" });
  made.dataset.label = label;
  made.append(...parts);
  return made;
}

function startComparing(box) {
  const form = document.getElementById("filters");
  const table = document.querySelector("table.claims");
  const rows = [...table.tBodies[0].rows];
  const said = document.getElementById("compared");
  const wrong = document.getElementById("compare-error");
  const input = document.getElementById("compare-file");
  const stop = document.getElementById("compare-stop");
  const chosen = (name) => [...form.elements[name].options].map((each) => each.value).filter(Boolean);
  const lanes = chosen("lane"), verdicts = chosen("verdict");
  const STATES = chosen("compare"); // verdict changed; same verdict, another value; the same; only here

  const clear = () => {
    for (const added of table.querySelectorAll(".added")) added.remove();
    for (const row of rows) {
      delete row.dataset.compare;
      delete row.dataset.difference;
    }
    table.classList.remove("compared");
    for (const each of document.querySelectorAll(".only-compared")) each.hidden = true;
    form.elements.compare.value = "";
    if (form.elements.sort.value === "difference") form.elements.sort.value = "";
    said.replaceChildren();
    stop.hidden = true;
  };

  const addHeads = () => {
    const heads = table.tHead.rows[0].cells;
    const head = (text, className) => element("th", text, { scope: "col", className: `added ${className}` });
    heads[2].after(head("Value there", "n"), head("Difference", "n"));
    heads[7].after(head("Verdict there", ""));
  };

  // Fill one row; `line` is what the other set has of it, if anything.
  const fill = (row, line) => {
    const { verdict, value, unit, expected } = row.dataset;
    const valueThere = line?.value ? element("span", withUnit(valueText(Number(line.value)), line.unit)) : element("span", "–");
    let off = { text: "–", share: "" };
    if (line?.value && value && line.unit === unit) off = difference(Number(value), Number(line.value), unit);
    row.dataset.difference = off.share === Infinity ? "inf" : off.share;
    row.dataset.compare = !line ? STATES[3] : line.verdict !== verdict ? STATES[0]
      : line.unit !== unit || line.value !== value && Number(line.value || NaN) !== Number(value || NaN) ? STATES[1] : STATES[2];
    const there = line ? [badge(line.verdict)] : [element("span", "not in it")];
    if (line && line.expected !== expected) there.push(element("small", `expected there: ${line.expected}`));
    const cells = row.cells;
    cells[2].after(cell("Value there", valueThere), cell("Difference", element("span", off.text), ...(off.part ? [element("small", off.part)] : [])));
    cells[3].classList.add("n");
    cells[4].classList.add("n");
    cells[7].after(cell("Verdict there", ...there));
  };

  // What the head says: how many of each state, which verdicts became which, and what is only there.
  const tell = (name, lines) => {
    const count = Object.fromEntries(STATES.map((state) => [state, rows.filter((row) => row.dataset.compare === state).length]));
    const shown = new Set(rows.map((row) => row.id));
    const there = new Map(lines.map((line) => [`${line.claim_id}.${line.lane}`, line]));
    const missing = lines.filter((line) => !shown.has(`${line.claim_id}.${line.lane}`));
    const head = element("p", "Compared with ");
    head.append(element("b", name), `: ${rows.length - count[STATES[3]]} verdicts are in both.`);
    const list = element("ul");
    for (const state of STATES) {
      const item = element("li");
      const show = element("button", `${count[state]} ${state}`, { type: "button" });
      show.addEventListener("click", () => {
        form.elements.compare.value = state;
        form.dispatchEvent(new Event("input"));
      });
      item.append(show);
      list.append(item);
    }
    const turned = {};
    for (const row of rows.filter((each) => each.dataset.compare === STATES[0])) {
      const words = `${there.get(row.id).verdict} → ${row.dataset.verdict}`;
      turned[words] = (turned[words] ?? 0) + 1;
    }
    said.replaceChildren(head, list);
    const changes = Object.entries(turned).map(([words, many]) => `${many} ${words}`);
    if (changes.length) said.append(element("p", `Verdicts that changed (there → here): ${changes.join("; ")}.`));
    if (missing.length) {
      const more = element("details"), ids = element("ul");
      for (const line of missing) ids.append(element("li", `${line.claim_id}, ${line.lane}: ${line.verdict}`));
      more.append(element("summary", `${missing.length} only there`), ids);
      said.append(more);
    }
  };

  const compare = ({ name, lines }) => {
    const there = new Map(lines.map((line) => [`${line.claim_id}.${line.lane}`, line]));
    if (!rows.some((row) => there.has(row.id))) throw new Error("none of its claims is on this page");
    clear();
    addHeads();
    for (const row of rows) fill(row, there.get(row.id));
    tell(name, lines);
    table.classList.add("compared");
    for (const each of document.querySelectorAll(".only-compared")) each.hidden = false;
    stop.hidden = false;
  };

  // Compare with a file of this machine; of a bad one say why, and keep what is shown.
  const choose = async (file) => {
    wrong.textContent = "";
    try {
      if (file.size > LARGEST) throw new Error(`no claims.csv: it is larger than ${LARGEST / 1e6} MB`);
      compare({ name: file.name, lines: readClaims(await file.text(), lanes, verdicts) });
      form.dispatchEvent(new Event("compared"));
    } catch (error) {
      wrong.textContent = `${file.name}: ${error.message}`;
    }
    input.value = "";
  };

  box.hidden = false;
  input.addEventListener("change", () => input.files.length && choose(input.files[0]));
  stop.addEventListener("click", () => {
    clear();
    form.dispatchEvent(new Event("compared"));
    input.focus();
  });
  const made = document.getElementById("against");
  if (made) {
    const set = JSON.parse(made.textContent);
    try {
      compare(set);
    } catch (error) {
      wrong.textContent = `${set.name}: ${error.message}`;
    }
  }
}

const compareBox = document.getElementById("compare");
if (compareBox) startComparing(compareBox);
