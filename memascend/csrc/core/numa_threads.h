// Which threads run which chunks of a kernel on a machine with several nodes that have processors: those near the data.
#pragma once

#include <sched.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace memascend {

// A node whose processors the calling thread may use.
struct CpuNode {
  int number;
  cpu_set_t cpus;
};

// Threads of one node and the chunks that are near it: order[begin .. end) of the plan.
struct NodeShare {
  CpuNode node;
  int threads;
  std::int64_t begin;
  std::int64_t end;
};

struct NumaPlan {
  std::vector<std::int64_t> order;  // every chunk once
  std::vector<NodeShare> shares;
};

// What a kernel reads or writes in its chunks, one after the other. `weight`: bytes moved for each byte of the array.
struct ChunkedArray {
  const void* data;
  std::int64_t bytes_per_chunk;
  int weight;
};

// Divides `threads` over the nodes in proportion to the chunks whose data lie nearest to them, no more on a node than
// it has processors as long as another has one left. Memory without processors (a CXL card) counts to the nearest node
// that has them. The kernel is asked about some pages of each array, so a chunk's place is that of its neighbours to
// within 1/128 of the whole. None where there is nothing to choose: one node with processors, one thread, less than 64
// chunks, or a kernel that does not say.
[[nodiscard]] std::optional<NumaPlan> plan_near_data(std::int64_t chunks, int threads,
                                                     const std::vector<ChunkedArray>& arrays);

// By node, given chunks and processors of each; as many as `threads`, which is at least 1.
[[nodiscard]] std::vector<int> divide_threads(int threads, const std::vector<std::int64_t>& chunks,
                                              const std::vector<int>& processors);

// The nearest of `nodes` (by number) in a row of the kernel's distances; -1 where two are equally near.
[[nodiscard]] int nearest_node(const std::vector<int>& nodes, const std::vector<int>& distances);

// Keeps the calling thread on a node's processors until the end of the scope: its own affinity is narrowed, never
// widened.
class OnNode {
 public:
  explicit OnNode(const CpuNode& node);
  ~OnNode();
  OnNode(const OnNode&) = delete;
  OnNode& operator=(const OnNode&) = delete;

 private:
  cpu_set_t before_;
  bool changed_ = false;
};

// The processor that the calling thread is on belongs to `node`.
[[nodiscard]] bool runs_on(const CpuNode& node);

// Chunks of planned kernels since the process began: run by a thread on the node of their data, and elsewhere.
struct ChunkCounts {
  std::int64_t near;
  std::int64_t elsewhere;
};
[[nodiscard]] ChunkCounts numa_chunk_counts();
void count_chunks(std::int64_t near, std::int64_t elsewhere);

}  // namespace memascend
