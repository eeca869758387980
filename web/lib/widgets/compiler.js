// The stage explorer: columns of a kernel's stages, in which lines of one source line light up together.
"use strict";

// The source line that shows most: that of the last pass which left evidence, else the first that reached the end. A
// pass's first evidence is of its own line; in SASS it may have moved.
function telling({ evidence, stages }) {
  const seen = evidence.map(([, found]) => found.find(([, line]) => line)?.[1]).filter(Boolean);
  return seen.at(-1) ?? stages.at(-1)[2].find(Boolean) ?? 1;
}

customElements.define(
  "kt-stages",
  class extends HTMLElement {
    connectedCallback() {
      this.filters = this.querySelector(".filters");
      this.columns = this.querySelector(".columns");
      this.told = this.querySelector(".told");
      this.kernel = this.filters.querySelector("select[name=kernel]");
      this.settings = [...this.filters.querySelectorAll(".setting select")];
      this.boxes = [...this.filters.querySelectorAll("fieldset input")];
      this.all = this.filters.querySelector("input[name=all]");
      this.filters.hidden = this.columns.hidden = false;
      this.querySelector(".excerpts").hidden = true;
      this.filters.addEventListener("change", (event) => this.chosen(event.target));
      this.columns.addEventListener("pointerover", (event) => { if (!this.pinned) this.point(event.target.closest(".line")); });
      this.columns.addEventListener("click", (event) => this.pin(event.target.closest(".line")));
      this.columns.addEventListener("keydown", (event) => this.key(event));
      addEventListener("hashchange", () => {
        if (location.hash.includes("stages=")) this.restore(); // others are places of the page
      });
      this.restore();
    }

    restore() {
      const wanted = new URLSearchParams(location.hash.slice(1));
      const name = wanted.get("stages") ?? this.dataset.default;
      this.settings.forEach((select, index) => {
        if (![...select.options].some((option) => option.value === name)) return;
        this.kernel.value = String(index);
        select.value = name;
      });
      const shown = wanted.get("columns")?.split(",") ?? [];
      if (this.boxes.filter((box) => shown.includes(box.name)).length >= 2) {
        for (const box of this.boxes) box.checked = shown.includes(box.name);
      }
      this.show(Number(wanted.get("line")) || 0);
    }

    get name() {
      return this.settings[Number(this.kernel.value)].value;
    }

    chosen(control) {
      if (this.boxes.includes(control)) {
        const open = this.boxes.filter((box) => box.checked).length;
        if (open < 2 || open > 6) control.checked = !control.checked;
      }
      if (control === this.all || this.boxes.includes(control)) this.arrange();
      else this.show(0);
      this.keep();
    }

    keep() {
      const columns = this.boxes.filter((box) => box.checked).map((box) => box.name);
      const state = { stages: this.name, columns: columns.join(","), line: String(this.lit || "") };
      history.replaceState(null, "", `#${new URLSearchParams(state)}`);
    }

    async show(line) {
      const name = this.name;
      this.settings.forEach((select, index) => {
        select.closest("label").hidden = String(index) !== this.kernel.value;
      });
      const made = await KT.load(`stages-${name}`);
      if (name !== this.name) return; // the reader chose again meanwhile
      this.pinned = false;
      this.columns.classList.remove("pinned");
      this.stale = made.stale;
      this.counts = new Map(made.stages.map(([key, title, , , many]) => [key, [title, many]]));
      this.lacks = made.lacks;
      this.tell(made);
      this.columns.replaceChildren(...made.stages.map((stage) => this.column(...stage)));
      this.arrange();
      this.light(made.stages[0][2].includes(line) ? line : telling(made), null);
    }

    // A listbox whose options are the stage's lines; the text was escaped when the site was built.
    column(key, title, numbers, code) {
      const box = document.createElement("section");
      box.className = `column ${key}`;
      box.dataset.stage = key;
      const options = code.split("\n").map((line, i) => {
        const at = numbers[i] || "";
        return `<div class="line" role="option" id="${key}-${i}" data-at="${at}"><span class="at">${at}</span>${line}</div>`;
      });
      box.innerHTML = `<h3 id="${key}-title">${title}</h3><div class="lines" role="listbox" tabindex="0"
        aria-labelledby="${key}-title">${options.join("")}</div>`;
      return box;
    }

    arrange() {
      const known = this.boxes.filter((box) => this.columns.querySelector(`.${box.name}`));
      if (!known.some((box) => box.checked)) { // CUDA has none of Triton's stages
        for (const box of known) box.checked = ["source", "sass"].includes(box.name);
      }
      for (const box of this.boxes) {
        box.disabled = !known.includes(box);
        if (!box.disabled) this.columns.querySelector(`.${box.name}`).hidden = !box.checked;
      }
      this.columns.querySelector(".llir")?.classList.toggle("folded", !this.all.checked);
    }

    point(line) {
      const at = Number(line?.dataset.at);
      if (line && at && at !== this.lit) this.light(at, line.closest(".column"));
    }

    // A click keeps the line, so that the pointer may go elsewhere; a click on it lets it go.
    pin(line) {
      if (!Number(line?.dataset.at)) return;
      const again = Number(line.dataset.at) === this.lit;
      this.pinned = !(again && this.pinned);
      this.columns.classList.toggle("pinned", this.pinned);
      if (!again) this.point(line);
      else this.light(this.lit, line.closest(".column"));
    }

    // Light a source line everywhere, and bring it into view but where the reader is.
    light(at, where, option = null) {
      for (const line of this.columns.querySelectorAll(".lit")) line.classList.remove("lit");
      this.lit = at;
      const counts = [];
      for (const column of this.columns.children) {
        const found = [...column.querySelectorAll(`.line[data-at="${at}"]`)];
        for (const line of found) line.classList.add("lit");
        const list = column.querySelector(".lines");
        const active = option && column === where ? option : found[0];
        if (active) list.setAttribute("aria-activedescendant", active.id);
        else list.removeAttribute("aria-activedescendant");
        if (column.hidden) continue;
        const [title, many] = this.counts.get(column.dataset.stage);
        if (many) counts.push(`${many[at] ?? 0} of ${title}`);
        if (found.length && column !== where) list.scrollTop = found[0].offsetTop - list.clientHeight / 3;
      }
      const dagger = this.stale ? "† The step's code changed since this was recorded. " : "";
      const lacks = this.lacks ? ` No AMDGCN: ${this.lacks}.` : "";
      const pinned = this.pinned ? " Kept: click it again to let it go." : "";
      this.told.textContent = `${dagger}Line ${at}: ${counts.join(", ")}.${pinned}${lacks}`;
      this.keepSoon();
    }

    keepSoon() {
      clearTimeout(this.timer);
      if (!location.hash.includes("stages=")) return; // a page that was only looked at keeps its address
      this.timer = setTimeout(() => this.keep(), 300);
    }

    key(event) {
      const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20, Home: -Infinity, End: Infinity }[event.key];
      const list = event.target.closest(".lines");
      if (step === undefined || !list) return;
      event.preventDefault();
      const lines = [...list.children].filter((line) => Number(line.dataset.at) && line.offsetParent);
      const now = lines.findIndex((line) => line.id === list.getAttribute("aria-activedescendant"));
      const next = lines[Math.max(0, Math.min(lines.length - 1, now + step))];
      if (!next) return;
      this.light(Number(next.dataset.at), list.closest(".column"), next);
      next.scrollIntoView({ block: "nearest" });
    }

    tell(made) {
      const row = ([name, value]) => `<tr><th scope="row">${name}</th><td>${value}</td></tr>`;
      this.querySelector(".facts tbody").innerHTML = made.facts.map(row).join("");
      for (const [name, found] of made.evidence) {
        const cell = this.querySelector(`tr[data-pass="${name}"] .seen`);
        const items = found.map(([stage, line, text]) => {
          const item = document.createElement("li");
          const code = document.createElement("code");
          code.textContent = text.length > 160 ? `${text.slice(0, 157)}...` : text;
          item.append(`${stage}${line ? `, of line ${line}` : ""}: `, code);
          return item;
        });
        const list = document.createElement("ul");
        list.append(...items);
        cell.replaceChildren(items.length ? list : made.absent);
      }
    }
  },
);
