// Numbers as every document writes them: the same digits as kernel_twins/report/meaning/write.py.
"use strict";

// A number to so many decimals, a tie to the even digit, as Python rounds.
KT.fixed = (value, decimals) => {
  const digits = Math.abs(value).toFixed(Math.min(100, decimals + 60));
  const text = Math.abs(value).toFixed(decimals);
  const tie = /^50*$/.test(digits.slice(digits.indexOf(".") + 1 + decimals));
  if (!tie || Number(text.at(-1)) % 2 === 0) return (value < 0 ? "-" : "") + text;
  const scale = 10 ** decimals;
  return (value < 0 ? "-" : "") + (Math.floor(Math.abs(value) * scale) / scale).toFixed(decimals);
};

KT.thousands = (text) => text.replace(/^(-?\d+)/, (whole) => whole.replace(/\B(?=(\d{3})+$)/g, ","));

// Three significant digits, thousands separated; a dash where nothing was measured.
KT.number = (value, digits = 3) => {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1) return small(value, digits);
  const text = KT.thousands(KT.fixed(value, Math.max(0, digits - String(Math.trunc(size)).length)));
  return text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text;

  function small(number, significant) {
    const exponent = Number(number.toExponential(significant - 1).split("e")[1]);
    const rounded = Number(KT.fixed(number, significant - 1 - exponent));
    if (exponent >= -4) return String(rounded);
    const mantissa = Number(rounded.toExponential(significant - 1).split("e")[0]);
    return `${mantissa}e-${String(-exponent).padStart(2, "0")}`;
  }
};

// The relative difference, a factor where it is more than doubled or halved, "=" where there is none.
KT.change = (before, after) => {
  if (before === null || after === null) return "";
  if (before === after) return "=";
  if (before === 0) return "new";
  const factor = after / before;
  if (factor >= 2 || factor <= 0.5) return `×${KT.number(factor, 2)}`;
  const percent = KT.fixed(100 * (factor - 1), 1);
  if (Number(percent) === 0) return "=";
  return `${Number(percent) > 0 ? "+" : ""}${percent} %`.replace("-", "−");
};

// A number with its source, as pages have it.
KT.shown = (text, value, source) => {
  const shown = document.createElement("data");
  shown.value = String(Number(value.toPrecision(6)));
  shown.dataset.src = source;
  shown.textContent = text;
  return shown;
};
