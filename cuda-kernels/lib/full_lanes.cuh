// Lanes a row, where a lane may have three packs. Terms: docs/glossary.md.
#pragma once

#include "packs.cuh"

// As choose_lanes, but three packs a lane where that leaves fewer places empty, from LEAST lanes on: 16 lanes
// of two packs have room for 32, of which a row of 22 packs would leave ten empty, in each of their
// instructions.
template <int LEAST, typename Launch>
bool choose_full_lanes(int64_t packs, Launch launch) {
  if (packs > 2 * LEAST && packs <= 3 * LEAST) {
    launch(std::integral_constant<int, LEAST>{}, std::integral_constant<int, 3>{});
    return true;
  }
  if constexpr (LEAST < 32) {
    return choose_full_lanes<2 * LEAST>(packs, launch);
  } else {
    return choose_lanes(packs, launch);
  }
}
