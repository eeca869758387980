// The queue of tiles of queries that persistent blocks draw from: those that see the most keys come first.
#pragma once

#include "lib/head_queue.cuh"
#include "problem.h"

// How many keys a query sees.
inline int64_t keys_of(const Problem& problem, int64_t row) {
  const int64_t low = std::max<int64_t>(row + problem.first, 0);
  return std::max<int64_t>(std::min<int64_t>(row + problem.last, problem.Sk - 1) - low + 1, 0);
}

inline Queue queue_of(const AttentionArgs& args, const Problem& problem, int block_m) {
  const int64_t bytes = args.Sk * args.D * 2 * size_of(args.dtype);  // of a head's keys and values
  Queue queue =
      queue_of_heads(*args.memory, args.B * args.H, args.Sq, block_m, problem.blocks_m, problem.group, bytes);
  weigh(queue, keys_of(problem, 0), keys_of(problem, problem.Sq - 1));
  return queue;
}
