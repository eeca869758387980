// Which of two is faster: kernel_twins/report/meaning/verdict.py in JavaScript, held against it by tests.
"use strict";

KT.verdict = (() => {
  const TAIL = (1 - 0.99) / 2;
  const SAME = 1.005;
  const NEGLIGIBLE = 1e-9;
  const known = new Map();

  const choose = (n, k) => {
    let ways = 1;
    for (let i = 1; i <= k; i += 1) ways = (ways * (n - k + i)) / i;
    return ways;
  };

  // The pairs of ranks that can be the two middle ones of a resample of n, and how probable each is.
  function middles(n) {
    if (known.has(n)) return known.get(n);
    const half = Math.floor((n + 1) / 2);
    const steps = Array.from({ length: n + 1 }, (_, i) => i / n);
    const atLeast = steps.map((p) => {
      let sum = 0;
      for (let k = half; k <= n; k += 1) sum += choose(n, k) * p ** k * (1 - p) ** (n - k);
      return sum;
    });
    const single = steps.slice(1).map((_, i) => atLeast[i + 1] - atLeast[i]);
    const pairs = Array.from({ length: n }, () => new Float64Array(n));
    if (n % 2 === 0) {
      const below = steps.slice(1).map((step, i) => step ** half - steps[i] ** half);
      const ways = choose(n, half);
      for (let i = 0; i < n; i += 1) {
        for (let j = i + 1; j < n; j += 1) {
          pairs[i][j] = ways * below[i] * below[n - 1 - j];
          single[i] -= pairs[i][j];
        }
      }
    }
    single.forEach((each, i) => { pairs[i][i] += each; });
    const found = [];
    for (let i = 0; i < n; i += 1) {
      for (let j = i; j < n; j += 1) {
        const weight = (pairs[i][j] + pairs[n - 1 - j][n - 1 - i]) / 2;
        if (weight > NEGLIGIBLE) found.push([i, j, weight]);
      }
    }
    known.set(n, found);
    return found;
  }

  const median = (sorted) => (sorted[Math.floor((sorted.length - 1) / 2)] + sorted[Math.floor(sorted.length / 2)]) / 2;
  const logs = (values) => values.map(Math.log);
  const ordered = (values) => [...values].sort((a, b) => a - b);

  function lowEnd(medians) {
    const sorted = [...medians].sort((a, b) => a[0] - b[0]);
    const whole = sorted.reduce((sum, each) => sum + each[1], 0);
    let reached = 0;
    for (const [value, weight] of sorted) {
      reached += weight;
      if (reached >= TAIL * whole) return value;
    }
    return sorted.at(-1)[0];
  }

  function ratio(middle, medians) {
    const low = lowEnd(medians);
    const high = -lowEnd(medians.map(([value, weight]) => [-value, weight]));
    const found = { value: Math.exp(middle), low: Math.exp(Math.min(low, middle)), high: Math.exp(Math.max(high, middle)) };
    found.verdict = found.low > SAME ? "FAST" : found.high < 1 / SAME ? "SLOW" : "SAME";
    return found;
  }

  // How many times faster ours is, from times of the same rounds.
  function paired(theirs, ours) {
    const mine = logs(ours);
    const differences = ordered(logs(theirs).map((each, i) => each - mine[i]));
    return ratio(median(differences), middles(mine.length).map(([i, j, w]) => [(differences[i] + differences[j]) / 2, w]));
  }

  // The same of cycles, whose samples are no pairs.
  function cycles(theirs, ours) {
    const samples = [theirs, ours].map((each) => ordered(logs(each)));
    const [a, b] = samples.map((each) => middles(each.length).map(([i, j, w]) => [(each[i] + each[j]) / 2, w]));
    const all = a.flatMap(([x, v]) => b.map(([y, w]) => [x - y, v * w]));
    return ratio(median(samples[0]) - median(samples[1]), all);
  }

  // The verdict by time, where cycles agree with it or where there are none.
  const standing = (time, counted) => (!counted || counted.verdict === time.verdict ? time.verdict : "AMBIGUOUS");

  return { paired, cycles, standing };
})();
