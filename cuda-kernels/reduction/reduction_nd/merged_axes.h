// A tensor's axes in the order of memory, merged to as few as possible.
//
// Free of CUDA, so that tests can compile it alone. Its counterpart is
// triton-kernels/reduction/reduction_nd/axes.py.
#pragma once

#include <algorithm>

#include "lib/axes.h"

// Puts axes into the order of memory, the innermost first, and merges an axis into the one within it if
// continues(outer, inner). Returns how many are left, at least one. Axes of stride 0 come last.
template <typename AnyAxis, typename Continues>
int merge(AnyAxis* found, int count, Continues continues) {
  // A stable sort: of equal strides, the axis that was given last becomes the inner one.
  std::stable_sort(found, found + count, [](const Axis& a, const Axis& b) {
    return a.stride != 0 && (b.stride == 0 || a.stride < b.stride);
  });
  int merged = 0;
  for (int a = 0; a < count; ++a) {
    const AnyAxis outer = found[a];
    AnyAxis& inner = found[merged - (merged > 0)];
    if (merged > 0 && outer.stride == inner.size * inner.stride && continues(outer, inner)) {
      static_cast<Axis&>(inner) = Axis(outer.size * inner.size, inner.stride, inner.step);
    } else {
      found[merged++] = outer;
    }
  }
  if (merged == 0) {
    found[merged] = {};
    static_cast<Axis&>(found[merged++]) = Axis(1, 0, 0);
  }
  return merged;
}

// The reduced axes of a tensor (or, with which = false, the kept ones), merged to as few as possible; the
// last one has the smallest stride.
//
// Axes of size 1 are dropped. Two axes are merged if one continues in memory where the other ends; if
// `ordered`, their steps must continue as well (otherwise steps mean nothing in the result). Axes of stride 0
// come first.
inline Axes axes_of(int rank, const int64_t* sizes, const int64_t* strides, const bool* reduced, bool which,
                    bool ordered) {
  Axis found[MOST_AXES];  // the innermost first
  int count = 0;
  int64_t step = 1;
  for (int a = rank - 1; a >= 0; --a) {
    if (reduced[a] != which) continue;
    if (sizes[a] != 1) found[count++] = Axis(sizes[a], strides[a], step);
    step *= sizes[a];
  }
  const int merged = merge(found, count, [&](const Axis& outer, const Axis& inner) {
    return !ordered || outer.step == inner.size * inner.step;
  });

  Axes axes;
  axes.rank = merged;
  for (int a = 0; a < merged; ++a) {
    axes.axis[a] = found[merged - 1 - a];
    axes.count *= axes.axis[a].size;
  }
  return axes;
}
