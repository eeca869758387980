// Any two calls: what is chosen on either side, kept in the address's hash, and what a reader's own report adds.
"use strict";

customElements.define(
  "kt-compare",
  class extends HTMLElement {
    async connectedCallback() {
      this.words = await KT.load("compare");
      this.launches = [];
      this.form = this.querySelector("form");
      this.told = this.querySelector("output");
      this.form.hidden = false;
      this.form.addEventListener("submit", (event) => event.preventDefault());
      for (const select of this.form.querySelectorAll("select")) {
        select.addEventListener("change", () => this.changed(select));
      }
      this.form.elements.swap.addEventListener("click", () => this.swap());
      this.form.elements.report.addEventListener("change", (event) => this.open(event.target.files[0]));
      addEventListener("hashchange", () => this.restore());
      await this.restore();
    }

    // A side as the address has it: OP/CASE/BACKEND/STEP; of the reader's report file/LAUNCH.
    async restore() {
      const wanted = new URLSearchParams(location.hash.slice(1));
      const sides = ["a", "b"].map((side, i) => wanted.get(side) ?? this.words.chosen[i]);
      this.state = await Promise.all(sides.map(async (text, i) => (await this.parsed(text)) ?? this.parsed(this.words.chosen[i])));
      await this.show();
    }

    async parsed(text) {
      const [op, slug, ...call] = text.split("/");
      if (op === "file") return this.launches[Number(slug)] ? { op, slug } : null;
      if (!Object.hasOwn(this.words.ops, op)) return null;
      const payload = await KT.load(op);
      const calls = Object.hasOwn(payload.cases, slug) ? payload.cases[slug] : {};
      return Object.hasOwn(calls, call.join("/")) ? { op, slug, call: call.join("/") } : null;
    }

    async changed(select) {
      const [side, field] = [Number(select.dataset.side), select.dataset.field];
      const own = this.state[side];
      const other = this.state[1 - side];
      const was = { ...own };
      if (field === "op") {
        await this.setOp(own, select.value, side);
        // The second side goes with the first one, until it has an operation or a case of its own.
        if (side === 0 && other.op === was.op && own.op !== "file") await this.setOp(other, own.op, 1);
      } else if (field === "case") {
        await this.setCase(own, select.value, side);
        if (side === 0 && other.op === own.op && other.slug === was.slug) await this.setCase(other, own.slug, 1);
      } else {
        own.call = select.value;
      }
      this.store();
      await this.show();
    }

    async setOp(own, op, side) {
      own.op = op;
      if (op === "file") {
        own.slug = "0";
        delete own.call;
      } else {
        await this.setCase(own, (await KT.load(op)).case, side);
      }
    }

    // The call stays where it was timed at the case; else the first side has the ladder's first step, the other the last.
    async setCase(own, slug, side) {
      own.slug = slug;
      if (own.op === "file") return;
      const timed = this.calls(await KT.load(own.op), slug);
      if (timed.includes(own.call)) return;
      const ladder = timed.filter((call) => call.startsWith("cuda/"));
      own.call = (ladder.length ? ladder : timed).at(side === 0 ? 0 : -1);
    }

    calls(payload, slug) {
      return Object.keys(payload.calls).filter((call) => call in payload.cases[slug]);
    }

    swap() {
      this.state.reverse();
      this.store();
      this.show();
    }

    async open(file) {
      if (!file) return;
      try {
        this.launches = KT.report.parse(await KT.report.text(file), file.name, this.words);
      } catch (error) {
        this.form.elements.report.value = "";
        this.told.value = error.message;
        return;
      }
      this.state = this.state.map((side, i) => (side.op === "file" || i === 1 ? { op: "file", slug: "0" } : side));
      this.store();
      await this.show();
    }

    store() {
      const [a, b] = this.state.map(({ op, slug, call }) => [op, slug, ...(call ? [call] : [])].join("/"));
      history.replaceState(null, "", `#a=${a}&b=${b}`);
    }

    async show() {
      const turn = (this.turn = (this.turn ?? 0) + 1);
      const sides = await Promise.all(this.state.map((side) => this.side(side)));
      const code = await this.code();
      if (turn !== this.turn) return;
      this.state.forEach((side, i) => this.fill(side, i, sides[i]));
      const found = KT.compare.all(this.words, ...sides);
      this.told.value = found.sentence;
      this.querySelector(".comparison").replaceChildren(...found.parts, KT.compare.code(...code));
    }

    async side({ op, slug, call }) {
      if (op === "file") return this.launches[Number(slug)];
      const payload = await KT.load(op);
      const cell = payload.cases[slug][call];
      const of = payload.calls[call];
      const values = this.words.quantities.map((_, i) => cell.quantities[i] ?? null);
      const counters = new Map(this.words.metrics.map(({ key }, i) => [key, cell.counters?.[i] ?? null]));
      return { op, slug, call, payload, cell, values, counters, sass: of.sass, title: `${of.title}${of.stale ? " †" : ""}` };
    }

    code() {
      return Promise.all(this.state.map(async ({ op, call }) => {
        const path = op === "file" ? null : (await KT.load(op)).calls[call].file;
        if (!path) return null;
        const { lines, files } = await KT.load(`code-${op}`);
        return { path, language: call.split("/")[0], lines: files[path].map((i) => lines[i]) };
      }));
    }

    fill({ op, slug, call }, side, found) {
      const [ops, cases, calls] = ["op", "case", "call"].map((field) => this.form.querySelector(`[data-side="${side}"][data-field=${field}]`));
      const own = this.launches.length ? [["file", `your report: ${this.launches[0].file}`]] : [];
      KT.compare.options(ops, [...Object.entries(this.words.ops), ...own], op);
      if (op === "file") {
        KT.compare.options(cases, this.launches.map((each, i) => [String(i), each.title]), slug);
        KT.compare.options(calls, [], "");
      } else {
        const { payload } = found;
        KT.compare.options(cases, Object.keys(payload.cases).map((each) => [each, each]), slug);
        KT.compare.options(calls, this.calls(payload, slug).map((each) => [each, payload.calls[each].title]), call);
      }
      calls.disabled = op === "file";
    }
  },
);
