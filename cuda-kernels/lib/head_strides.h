// Where the heads of a tensor [B, heads, S, D] lie.
#pragma once

#include <cstdint>

// Elements between neighbours; the D elements of a row are neighbours.
struct HeadStrides {
  int64_t batch, head, row;
};
