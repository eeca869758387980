// A tile of keys of a batch, or of sequences of different lengths, as v10's blocks draw it.
#pragma once

#include "lib/head_band.cuh"
#include "lib/head_queue.cuh"
#include "lib/packed_sequences.h"
#include "problem.h"

// What v10 serves beyond a BackwardProblem.
struct AnyBackwardProblem : BackwardProblem {
  HeadStrides dq_stride, dk_stride, dv_stride;
  float cap;  // with a softcap, turns scores into its tanh's arguments; 0 without one
  bool from_end;
  PackedSequences queries, keys;  // without sequences their starts are null
};

// A tile: its head of keys and batch, its first key within its sequence, and that sequence. `head` is -1
// behind the last tile.
struct KeyTask {
  int head, batch, key;
  int first_q, first_k;  // tokens before the sequence
  int Sq, Sk;
  int first, last;  // query i sees the keys from i + first to i + last
  float factor;     // the problem's
  Tiles tiles;      // of queries that are to be visited, of each head of the group
  int64_t place;    // of the group's first query, among the rows of lse, delta and dq's sums
};

// Sets the task of a number in the queue's order, field by field, as it may lie in shared memory. Of
// sequences, one has whole tiles of BLOCK_M queries, and of BLOCK_N keys. False if the number has no tile:
// slots may be empty.
template <int BLOCK_M, int BLOCK_N>
__device__ inline bool set_task(KeyTask& task, const AnyBackwardProblem& problem, const Queue& queue,
                                unsigned number) {
  task.head = -1;
  if (number >= static_cast<unsigned>(queue.tiles)) return true;
  int Sq = problem.Sq, Sk = problem.Sk, key, padded_q = 0;
  if (problem.keys.starts == nullptr) {
    const Work work = work_of(queue, number);
    task.head = work.head % problem.kv_heads;
    task.batch = work.head / problem.kv_heads;
    task.first_q = task.first_k = 0;
    key = work.row;
  } else {
    task.head = static_cast<int>(number) % problem.kv_heads;  // all heads of a slot behind each other
    const int in_order = static_cast<int>(number) / problem.kv_heads;
    const int slot = queue.last_first ? queue.blocks - 1 - in_order : in_order;
    const int n = problem.keys.sequence_of(slot, BLOCK_N);
    key = (slot - problem.keys.first_slot(n, BLOCK_N)) * BLOCK_N;
    const int first_q = problem.queries.starts[n], first_k = problem.keys.starts[n];
    Sq = problem.queries.starts[n + 1] - first_q;
    Sk = problem.keys.starts[n + 1] - first_k;
    if (key < 0 || key >= Sk) return false;
    task.batch = 0;
    task.first_q = first_q;
    task.first_k = first_k;
    padded_q = problem.queries.first_slot(n, BLOCK_M) * BLOCK_M;
  }
  const int64_t head = static_cast<int64_t>(task.batch) * problem.heads + task.head * problem.group;
  task.place = head * problem.padded + padded_q;
  const int shift = problem.from_end ? Sk - Sq : 0;
  task.key = key;
  task.Sq = Sq;
  task.Sk = Sk;
  task.first = min(max(problem.first + shift, -Sq), Sk);
  task.last = min(max(problem.last + shift, -Sq), Sk);
  task.factor = problem.factor;
  task.tiles = queries_of(task, key, BLOCK_N, BLOCK_M);
  return true;
}

// A visit of a task: the head among its group's, and how many tiles of it were visited before. Where heavy
// tiles of keys, which are the first to be drawn, reach the last queries, these come first.
struct Visit {
  int head = 0, tile = 0;

  __device__ bool exists(const BackwardProblem& problem, const KeyTask& task) const {
    return head < problem.group && task.tiles.count > 0;
  }
  __device__ void advance(const KeyTask& task) {
    if (++tile < task.tiles.count) return;
    tile = 0;
    ++head;
  }
  __device__ int row(const Queue& queue, const KeyTask& task, int block_m) const {
    return (task.tiles.first + (queue.last_first ? tile : task.tiles.count - 1 - tile)) * block_m;
  }
};

// How many tiles of keys of which some are seen by the BLOCK_M queries from `row` on are drawn before the
// task's.
template <int BLOCK_M, int BLOCK_N>
__device__ inline int tasks_before(const Queue& queue, const KeyTask& task, int row) {
  if (!queue.last_first) return task.key / BLOCK_N - max(row + task.first, 0) / BLOCK_N;
  const int last_row = min(row + BLOCK_M, task.Sq) - 1;
  return min(last_row + task.last, task.Sk - 1) / BLOCK_N - task.key / BLOCK_N;
}
