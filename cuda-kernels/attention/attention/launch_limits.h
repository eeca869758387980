// What limits a launch.
#pragma once

#include <stdexcept>
#include <string>

#include "args.h"

// Throws std::runtime_error if heads are wider than the tiles of all steps but the last.
inline void require_narrow_heads(const AttentionArgs& args) {
  if (args.D > 128) {
    throw std::runtime_error("D is " + std::to_string(args.D) + ", must be at most 128: take v13_dispatch");
  }
}

// Blocks of a grid with one for each of a head's blocks_m tiles of queries; it is flat, since its y and z
// would end at 65535. Throws std::runtime_error from 2^31 blocks on.
inline unsigned blocks_of(const AttentionArgs& args, int64_t blocks_m) {
  const int64_t blocks = args.B * args.H * blocks_m;
  if (blocks >= int64_t{1} << 31) {
    throw std::runtime_error("attention of " + std::to_string(args.B * args.H) + " heads and " +
                             std::to_string(args.Sq) + " queries takes " + std::to_string(blocks) +
                             " blocks, a grid has fewer than 2^31: split the batch");
  }
  return static_cast<unsigned>(blocks);
}
