// What two sides have in common, as sentences, tables and stacked bars.
"use strict";

KT.compare = (() => {
  const TIMED = ["time", "rate", "ceiling_share", "error_over_torch"];
  const PARTS = 6;
  const CONTEXT = 3;

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function options(select, entries, chosen) {
    select.replaceChildren(...entries.map(([value, text]) => new Option(text, value)));
    select.value = chosen;
  }

  // How large a change is: infinite from and to nothing, least where a side is unknown.
  // Rounded, as that of a rate is that of its time.
  function weight(before, after) {
    if (before === null || after === null) return -1;
    if (before === after) return 0;
    return before > 0 && after > 0 ? Number(Math.abs(Math.log(after / before)).toFixed(6)) : Infinity;
  }

  const sorted = (rows) => rows
    .filter((row) => row.before !== null || row.after !== null)
    .map((row) => ({ ...row, weight: weight(row.before, row.after) }))
    .sort((x, y) => (x.weight === y.weight ? 0 : y.weight - x.weight));

  const quantitySource = (side, key) => (side.op === "file"
    ? `${side.file}#${side.slug}/${key}`
    : `${side.op}.${TIMED.includes(key) ? "timings" : "counters"}.csv#${side.slug}/${side.call}/${key}`);

  function quantityRows(words, a, b) {
    const unit = [a, b].map((side) => side.payload?.unit).filter(Boolean);
    return words.quantities.map(({ key, heading }, i) => {
      const values = [a, b].map((side) => side.values[i]);
      // Rates of another unit are no multiples of each other.
      const apart = key === "rate" && new Set(unit).size > 1;
      return {
        key, heading: key === "rate" ? `rate, ${unit[0] ?? ""}` : heading,
        before: values[0], after: apart ? null : values[1], sources: [a, b].map((side) => quantitySource(side, key)),
      };
    });
  }

  function counterRows(words, a, b) {
    const known = new Map(words.metrics.map((metric) => [metric.key, metric]));
    const names = [...a.counters.keys()].filter((name) => b.counters.has(name));
    return names.map((name) => {
      const unit = known.get(name)?.unit ?? a.units?.get(name) ?? "";
      const meaning = known.get(name)?.meaning;
      return {
        key: name, heading: `${meaning ? `${meaning} · ` : ""}${name}${unit ? `, ${unit}` : ""}`,
        before: a.counters.get(name), after: b.counters.get(name), sources: [a, b].map((side) => quantitySource(side, name)),
      };
    });
  }

  function stallRows(words, a, b) {
    return words.stalls.map(({ key, name, meaning }) => ({
      key, heading: `${name.replaceAll("_", " ")}: ${meaning}`, short: name.replaceAll("_", " "),
      before: a.counters.get(key) ?? null, after: b.counters.get(key) ?? null,
      sources: [a, b].map((side) => quantitySource(side, key)),
    }));
  }

  function sassRows(words, a, b) {
    const source = (side, column) => {
      const [backend, step] = side.call.split("/");
      return `${words.static}#${side.op}/${step}/${backend}/${side.sass.kernel}/${column}`;
    };
    return words.sass.map((column, i) => ({
      key: column, heading: column, short: column,
      before: a.sass?.counts[i] ?? null, after: b.sass?.counts[i] ?? null,
      sources: [a, b].map((side) => (side.sass ? source(side, column) : "")),
    })).filter((row) => row.before || row.after);
  }

  function table(caption, first, rows) {
    const cell = (value, source) => element("td", {}, value === null ? "–" : KT.shown(KT.number(value), value, source));
    const head = element("thead", {}, element("tr", {}, ...[first, "A, before", "B, after", "change"].map((text) => element("th", { scope: "col" }, text))));
    const body = element("tbody", {}, ...sorted(rows).map((row) => element(
      "tr", { "data-key": row.key },
      element("th", { scope: "row" }, row.heading),
      cell(row.before, row.sources[0]), cell(row.after, row.sources[1]), element("td", {}, KT.change(row.before, row.after)),
    )));
    const badge = element("span", { class: "badge recorded" }, "recorded");
    const made = element("table", { class: "moved" }, element("caption", {}, `${caption} `, badge), head, body);
    return element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": caption }, made);
  }

  // Two bars on one scale: the largest parts by name, the others together.
  function bars(titles, rows, totals) {
    const largest = [...rows].sort((x, y) => Math.max(y.before ?? 0, y.after ?? 0) - Math.max(x.before ?? 0, x.after ?? 0)).slice(0, PARTS);
    const scale = Math.max(...totals);
    const bar = (side, i) => {
      const parts = largest.map((row, n) => [row.short, row[side] ?? 0, n + 1]);
      const rest = totals[i] - parts.reduce((sum, part) => sum + part[1], 0);
      const shown = [...parts, ["others", Math.max(rest, 0), PARTS + 1]].filter(([, value]) => value > 0);
      const segments = shown.map(([name, value, n]) => {
        const made = element("span", { class: `part part-${n}`, title: `${name}: ${KT.number(value)}` }, name);
        made.style.width = `${(100 * value) / scale}%`;
        return made;
      });
      return [element("span", { class: "side" }, titles[i]), element("div", { class: "bar" }, ...segments)];
    };
    return element("div", { class: "bars", "aria-hidden": "true" }, ...bar("before", 0), ...bar("after", 1));
  }

  const total = (rows, side) => rows.reduce((sum, row) => sum + (row[side] ?? 0), 0);

  function ratio(a, b) {
    if (a.op === "file" || a.op !== b.op || a.slug !== b.slug) return null;
    for (const contest of ["fast", "slow"]) {
      const [theirs, ours] = [a, b].map((side) => side.cell.rounds[contest]);
      if (theirs && ours && theirs[0] === ours[0]) {
        const time = KT.verdict.paired(theirs[1], ours[1]);
        const counted = a.cell.cycles && b.cell.cycles ? KT.verdict.cycles(a.cell.cycles, b.cell.cycles) : null;
        return { ...time, standing: KT.verdict.standing(time, counted) };
      }
    }
    return null;
  }

  const named = (side) => (side.op === "file" ? side.title : `${side.op} ${side.title}`);

  function sentence(words, a, b, rows) {
    const found = ratio(a, b);
    const refused = [a, b].filter((side) => side.cell.status).map((side) => `${named(side)} has no time: ${side.cell.status}. `).join("");
    // Not of shares: one that rises from almost nothing has a large factor and says little.
    const moved = rows.find((row) => row.weight > 0 && Number.isFinite(row.weight) && !TIMED.includes(row.key) && !row.heading.endsWith("%"));
    const change = (row, unit) => `${row.heading.split(",")[0]}: ${KT.number(row.before)} → ${KT.number(row.after)}${unit}`;
    const most = moved ? ` Most of all changed ${change(moved, moved.heading.includes(",") ? ` ${moved.heading.split(", ")[1]}` : "")}.` : "";
    const time = rows.find((row) => row.key === "time" && row.weight >= 0);
    const times = time ? ` The ${change(time, " µs")}.` : "";
    if (found) {
      const apart = Math.abs((found.value * b.values[0]) / a.values[0] - 1) > 0.02
        ? " Its rounds are of one contest, at another clock than the times below." : "";
      const interval = `99 % interval ${KT.fixed(found.low, 3)} to ${KT.fixed(found.high, 3)}`;
      return `B, ${named(b)}, is ${KT.fixed(found.value, 3)} × as fast as A, ${named(a)} (${interval}): ${found.standing}.${apart}${most}`;
    }
    const unpaired = a.values[0] && b.values[0] && a.op === b.op && a.slug === b.slug
      ? " They were timed in different contests, so that the change has no interval." : " Nothing is claimed of times of different work.";
    return `${refused}A is ${named(a)}, B is ${named(b)}.${times}${unpaired}${most}`;
  }

  function limits(a, b) {
    const line = (letter, side) => element("p", { class: "limit" }, element("strong", {}, `${letter}, ${named(side)}: `),
      side.cell.limit ? `limited by ${side.cell.limit}.` : side.op === "file"
        ? "`ncu_report.py extract` without --json says what limits it." : "not profiled at this case.");
    return [element("h2", {}, "What limits them"), line("A", a), line("B", b)];
  }

  function all(words, a, b) {
    const rows = quantityRows(words, a, b);
    const parts = [element("h2", {}, "Quantities"), table("Quantities, the largest change first", "quantity", rows), ...limits(a, b)];
    const stalls = stallRows(words, a, b);
    if (stalls.some((row) => row.before !== null || row.after !== null)) {
      const bar = bars(["A", "B"], stalls, ["before", "after"].map((side) => total(stalls, side)));
      parts.push(element("h2", {}, "What warps wait for"), bar, table("Stalls, in cycles an issue", "stall", stalls));
    }
    const sass = sassRows(words, a, b);
    if (sass.length) {
      const classes = sass.filter((row) => row.key !== "instructions");
      parts.push(element("h2", {}, "Instructions of note"), bars(["A", "B"], classes, ["before", "after"].map((side) => total(classes, side))));
      for (const [letter, side] of [["A", a], ["B", b]]) {
        if (side.sass) parts.push(element("p", { class: "file" }, `${letter}: `, element("code", {}, side.sass.kernel), `, of ${side.sass.kernels} the one with most instructions`));
      }
      parts.push(table("SASS of the kernels, in instructions", "class", sass));
    }
    const counters = counterRows(words, a, b).filter((row) => row.before !== null && row.after !== null);
    if (counters.length) {
      const details = element("details", {}, element("summary", {}, `All ${counters.length} counters that both have`));
      details.append(table("Counters by ncu's names", "counter", counters));
      parts.push(details);
    }
    return { sentence: sentence(words, a, b, sorted(rows)), parts };
  }

  return { all, code: (...files) => KT.codeDiff(element, CONTEXT, ...files), options, weight, ratio };
})();
