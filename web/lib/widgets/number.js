// Where a number is from: its row by pointing at it; by a click a card that says how it is computed and measured anew.
"use strict";

customElements.define(
  "kt-number",
  class extends HTMLElement {
    connectedCallback() {
      this.card = document.createElement("div");
      this.card.className = "card";
      this.card.setAttribute("role", "status");
      this.card.hidden = true;
      this.append(this.card);
      addEventListener("pointerover", ({ target }) => this.title(target.closest("data[data-src]:not([title])")));
      addEventListener("focusin", ({ target }) => target.querySelectorAll("data[data-src]:not([title])").forEach((each) => this.title(each)));
      addEventListener("click", ({ target }) => this.click(target));
      addEventListener("keydown", ({ key }) => { if (key === "Escape") this.card.hidden = true; });
    }

    // A table says once what its sources begin with.
    source(number) {
      const { src } = number.dataset;
      return src.startsWith("/") ? number.closest("table").dataset.base + src : src;
    }

    async title(number) {
      if (!number) return;
      const source = (number.title = this.source(number));
      const cell = measured(source);
      if (cell) number.title = `${source}\n${await this.run(cell)}\nClick: how it is computed and measured anew`;
    }

    async run({ op, slug, calls }) {
      const { told, of } = await KT.load("runs");
      return told[of[op][`${slug}/${calls[0]}`] ?? of[op][""]];
    }

    async click(target) {
      const number = target.closest("data[data-src]");
      if (this.card.contains(target)) return;
      this.card.hidden = true;
      if (!number || target.closest("a, button, summary, label")) return;
      const source = this.source(number);
      const cell = measured(source);
      const lines = cell ? await this.told(cell) : [["Source", source]];
      this.card.replaceChildren(
        Object.assign(document.createElement("strong"), { textContent: number.textContent }),
        ...lines.map(([title, text, kind]) => line(title, text, kind)),
      );
      this.card.hidden = false;
      KT.place(this.card, number.getBoundingClientRect());
    }

    async told(cell) {
      const { op, table, slug, calls } = cell;
      const { quantities } = await KT.load("runs");
      const names = calls.map((call) => call.replace(/\/-$/, "").replace("/", " "));
      return [
        ["", meaning(cell, names, quantities)],
        ["Rows", `${this.dataset.folder}${op}.${table}.csv: case ${slug}, ${names.join(" and ")}`, "code"],
        ["Run", await this.run(cell)],
        ["Measure all calls of this case anew, on a GPU and from the repository's root", `python profiling/ncu_report.py collect --op ${op} --shape ${slug}`, "code"],
      ];
    }
  },
);

// The parts of a source that names a cell of a ladder's tables, as numbers.py writes it.
function measured(source) {
  const [, op, table, slug, called, key] = /^(\w+)\.(timings|counters)\.csv#([^/]+)\/(.+)\/([^/]+)$/.exec(source) ?? [];
  return op && { op, table, slug, calls: called.split("|"), key };
}

function meaning({ table, key, calls }, [ours, theirs], quantities) {
  const pairs = "the median over the rounds in which both were timed";
  if (key === "ratio") return `How many times as fast ${ours} is as ${theirs}: ${pairs}`;
  if (key === "low" || key === "high") return `The ${key === "low" ? "lower" : "upper"} end of that ratio's 99 % interval, by bootstrap`;
  if (key === "paired") return `The time of ${ours} over that of ${theirs}: ${pairs}`;
  if (key === "multiple") return `How many times as fast ${ours} is as ${theirs}: by rounds if one contest timed both, else by medians`;
  const name = quantities[key.replace(/^more\./, "")] ?? key;
  if (calls.length > 1) return key.startsWith("more.") ? `By which share ${name} of ${ours} is more than of ${theirs}` : `${name}: ${ours} over ${theirs}`;
  return `${name} of ${ours}, ${table === "timings" ? "from the median of times_us" : "from ncu's counters"}`;
}

function line(title, text, kind = "span") {
  const told = document.createElement("p");
  told.append(title && `${title}: `, Object.assign(document.createElement(kind), { textContent: text }));
  return told;
}
