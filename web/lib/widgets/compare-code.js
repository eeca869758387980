// Two files: what differs where both are of one language, else both as they are. Lines come coloured.
"use strict";

KT.codeDiff = (element, context, a, b) => {
  const section = element("section", {}, element("h2", {}, "Code"));
  if (!a || !b) {
    section.append(element("p", {}, "One of the two is no step of a ladder, and has no file here."));
    return section;
  }
  if (a.language !== b.language) {
    section.append(element("p", {}, "The files are of two languages: they stand beside each other."),
      element("div", { class: "twins" }, whole(a), whole(b)));
  } else {
    section.append(element("p", { class: "file" }, element("code", {}, a.path), " → ", element("code", {}, b.path)), changed());
  }
  return section;

  function line(kind, html) {
    const made = element("span", kind ? { class: kind } : {});
    made.innerHTML = `${html}\n`;
    return made;
  }

  function region(label, ...children) {
    return element("div", { class: "wide", tabindex: "0", role: "region", "aria-label": label }, ...children);
  }

  function whole(file) {
    const code = element("pre", { class: "diff" }, ...file.lines.map((html) => line("", html)));
    return element("article", { class: "twin" }, element("p", { class: "file" }, element("code", {}, file.path)), region(file.path, code));
  }

  function changed() {
    const parts = Diff.diffArrays(a.lines, b.lines);
    if (parts.every((part) => !part.added && !part.removed)) return element("p", {}, "The files are equal.");
    const shown = [];
    let hunk = null;
    parts.forEach((part, i) => {
      const kind = part.added ? "new" : part.removed ? "gone" : "";
      if (kind) {
        hunk ??= start();
        hunk.append(...part.value.map((html) => line(kind, html)));
        return;
      }
      const [first, last] = [i === 0, i === parts.length - 1];
      const after = first ? [] : part.value.slice(0, context);
      const before = last ? [] : part.value.slice(Math.max(after.length, part.value.length - context));
      if (hunk) hunk.append(...after.map((html) => line("", html)));
      if (last) return;
      if (after.length + before.length < part.value.length || !hunk) hunk = start();
      hunk.append(...before.map((html) => line("", html)));
    });
    return region("Changed lines", ...shown);

    function start() {
      shown.push(element("pre", { class: "diff" }));
      return shown.at(-1);
    }
  }
};
