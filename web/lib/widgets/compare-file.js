// A reader's own report: what `ncu_report.py extract X.ncu-rep --json` prints. It is read here and sent nowhere.
"use strict";

KT.report = (() => {
  const ACCEPTED = "Accepted is the JSON that `python profiling/ncu_report.py extract X.ncu-rep --json` prints: a list of "
    + "counters, each with launch, kernel, metric and value.";

  class RefusedError extends Error {
    constructor(name, got) {
      super(`${name} is ${got}. ${ACCEPTED}`);
    }
  }

  function text(file) {
    return new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(new RefusedError(file.name, `not readable (${reader.error.message})`));
      reader.readAsText(file);
    });
  }

  const kind = (value) => (value === null ? "null" : Array.isArray(value) ? "a list" : `${typeof value === "object" ? "an" : "a"} ${typeof value}`);

  function parsed(content, name) {
    try {
      return JSON.parse(content);
    } catch {
      const shown = content.slice(0, 24).replace(/[^\x20-\x7e]+/g, "·");
      throw new RefusedError(name, content ? `no JSON: it begins with “${shown}”` : "empty");
    }
  }

  // The launches of a report, each with the counters that have a value.
  function parse(content, name, words) {
    const rows = parsed(content, name);
    if (!Array.isArray(rows)) throw new RefusedError(name, `JSON of ${kind(rows)}`);
    if (!rows.length) throw new RefusedError(name, "an empty list");
    const launches = new Map();
    rows.forEach((row, i) => {
      const lacking = ["launch", "kernel", "metric", "value"].filter((key) => !(key in Object(row)));
      if (lacking.length) throw new RefusedError(name, `a list whose entry ${i + 1} has no ${lacking.join(", ")}`);
      if (row.value !== null && typeof row.value !== "number") {
        throw new RefusedError(name, `a list whose entry ${i + 1} has ${kind(row.value)} as the value of ${row.metric}`);
      }
      const key = `${row.file ?? ""}#${row.launch}`;
      if (!launches.has(key)) launches.set(key, { kernel: String(row.kernel), launch: row.launch, counters: new Map(), units: new Map() });
      launches.get(key).counters.set(row.metric, row.value);
      launches.get(key).units.set(row.metric, row.unit ?? "");
    });
    return [...launches.values()].map((each) => ({
      op: "file",
      file: name,
      slug: String(each.launch),
      title: `${each.launch}: ${short(each.kernel)}`,
      kernel: each.kernel,
      counters: each.counters,
      units: each.units,
      values: words.quantities.map(({ formula }) => KT.report.compute(formula, each.counters)),
      cell: {},
    }));
  }

  function short(kernel) {
    return kernel.replace(/^void /, "").replace(/[<(].*$/s, "").split("::").at(-1) || kernel.slice(0, 40);
  }

  // A quantity from counters; null where its formula has none, one is missing, or the one below is 0.
  function compute(formula, counters) {
    const above = formula.above.map((name) => counters.get(name) ?? null);
    if (!above.length || above.includes(null)) return null;
    const total = formula.scale * above.reduce((sum, value) => sum + value, 0);
    if (!formula.below) return total;
    const below = counters.get(formula.below);
    return below ? total / below : null;
  }

  return { text, parse, compute };
})();
