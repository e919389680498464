#include "numa_threads.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "pinned.h"
#include "placement.h"
#include "text_file.h"

namespace memascend {
namespace {

// Making a plan asks the kernel about one page per array and sample, which does not pay off for fewer chunks.
constexpr std::int64_t kLeastChunks = 64;
constexpr std::int64_t kSamples = 128;

std::atomic<std::int64_t> chunks_near{0};
std::atomic<std::int64_t> chunks_elsewhere{0};

std::string of_nodes(const std::string& file) { return text_of("/sys/devices/system/node/" + file); }

struct Machine {
  std::vector<CpuNode> nodes;  // those that have processors
  std::map<int, int> nearest;  // for each node an index into `nodes`, or -1 if several are equally near
};

std::string of_node(int node, const char* file) { return of_nodes("node" + std::to_string(node) + "/" + file); }

Machine read_machine() {
  Machine machine;
  const std::vector<int> numbers = listed(of_nodes("online"));
  std::vector<int> with_cpus;  // positions in a row of distances
  for (std::size_t place = 0; place < numbers.size(); ++place) {
    CpuNode node{numbers[place], {}};
    CPU_ZERO(&node.cpus);
    for (const int cpu : listed(of_node(node.number, "cpulist"))) {
      if (cpu < CPU_SETSIZE) {
        CPU_SET(cpu, &node.cpus);
      }
    }
    if (CPU_COUNT(&node.cpus) > 0) {
      machine.nodes.push_back(node);
      with_cpus.push_back(static_cast<int>(place));
    }
  }
  for (const int number : numbers) {
    const std::vector<int> distances = numbers_of(of_node(number, "distance"));
    machine.nearest[number] = distances.size() == numbers.size() ? nearest_node(with_cpus, distances) : -1;
  }
  return machine;
}

const Machine& machine() {
  static const Machine read = read_machine();
  return read;
}

// Returns the nodes of the machine with the processors that the calling thread may use. Nodes without any are kept, so
// that indices stay valid.
std::vector<CpuNode> usable_nodes() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  std::vector<CpuNode> nodes = machine().nodes;
  if (sched_getaffinity(0, sizeof mask, &mask) != 0) {
    return {};
  }
  for (CpuNode& node : nodes) {
    CPU_AND(&node.cpus, &node.cpus, &mask);
  }
  return nodes;
}

// Returns for each of `samples` equal runs of chunks the index of the node that is nearest to most of the bytes that it
// moves, or -1 if there is no single one.
std::vector<int> homes(std::int64_t chunks, std::int64_t samples, const std::vector<ChunkedArray>& arrays,
                       std::size_t nodes) {
  std::vector<void*> asked;
  for (std::int64_t sample = 0; sample < samples; ++sample) {
    const std::int64_t middle = chunks * (2 * sample + 1) / (2 * samples);
    for (const ChunkedArray& array : arrays) {
      const auto at =
          reinterpret_cast<std::uintptr_t>(array.data) + static_cast<std::uintptr_t>(middle * array.bytes_per_chunk);
      asked.push_back(reinterpret_cast<void*>(at / kPageBytes * kPageBytes));
    }
  }
  const std::vector<int> answers = nodes_of_pages(asked);
  std::vector<int> found(static_cast<std::size_t>(samples), -1);
  for (std::size_t sample = 0; sample < found.size() && answers.size() == asked.size(); ++sample) {
    std::vector<std::int64_t> bytes(nodes, 0);
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      const auto home = machine().nearest.find(answers[sample * arrays.size() + i]);
      if (home != machine().nearest.end() && home->second >= 0) {
        bytes[static_cast<std::size_t>(home->second)] += arrays[i].bytes_per_chunk * arrays[i].weight;
      }
    }
    const auto most = std::max_element(bytes.begin(), bytes.end());
    if (*most > 0 && std::count(bytes.begin(), bytes.end(), *most) == 1) {
      found[sample] = static_cast<int>(most - bytes.begin());
    }
  }
  return found;
}

}  // namespace

int nearest_node(const std::vector<int>& nodes, const std::vector<int>& distances) {
  int best = -1;
  int least = 0;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const int distance = distances[static_cast<std::size_t>(nodes[i])];
    if (i == 0 || distance < least) {
      best = static_cast<int>(i);
      least = distance;
    } else if (distance == least) {
      best = -1;
    }
  }
  return best;
}

std::vector<int> divide_threads(int threads, const std::vector<std::int64_t>& chunks,
                                const std::vector<int>& processors) {
  std::vector<int> divided(chunks.size(), 0);
  for (int given = 0; given < threads; ++given) {
    // The next thread goes to the node with the most chunks per thread, counting this thread. As long as any node has
    // an unused processor, only such nodes are considered.
    const bool left = std::inner_product(processors.begin(), processors.end(), divided.begin(), false,
                                         std::logical_or<>(), [](int cpus, int used) { return cpus > used; });
    std::size_t next = chunks.size();
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      if (processors[i] == 0 || (left && divided[i] >= processors[i])) {
        continue;
      }
      if (next == chunks.size() || chunks[i] * (divided[next] + 1) > chunks[next] * (divided[i] + 1)) {
        next = i;
      }
    }
    if (next == chunks.size()) {
      break;
    }
    ++divided[next];
  }
  return divided;
}

std::optional<NumaPlan> plan_near_data(std::int64_t chunks, int threads, const std::vector<ChunkedArray>& arrays) {
  if (threads < 2 || chunks < kLeastChunks || machine().nodes.size() < 2) {
    return std::nullopt;
  }
  const std::vector<CpuNode> nodes = usable_nodes();
  std::vector<int> processors;
  processors.reserve(nodes.size());
  for (const CpuNode& node : nodes) {
    processors.push_back(CPU_COUNT(&node.cpus));
  }
  if (std::count_if(processors.begin(), processors.end(), [](int cpus) { return cpus > 0; }) < 2) {
    return std::nullopt;
  }
  const std::int64_t samples = std::min(kSamples, chunks);
  const std::vector<int> found = homes(chunks, samples, arrays, nodes.size());
  if (std::all_of(found.begin(), found.end(), [](int home) { return home < 0; })) {
    return std::nullopt;
  }
  std::vector<std::vector<std::int64_t>> near(nodes.size());
  const auto add = [&](std::int64_t sample, std::size_t node) {
    for (std::int64_t chunk = chunks * sample / samples; chunk < chunks * (sample + 1) / samples; ++chunk) {
      near[node].push_back(chunk);
    }
  };
  std::vector<std::int64_t> anywhere;
  for (std::int64_t sample = 0; sample < samples; ++sample) {
    const int home = found[static_cast<std::size_t>(sample)];
    if (home < 0 || processors[static_cast<std::size_t>(home)] == 0) {
      anywhere.push_back(sample);
    } else {
      add(sample, static_cast<std::size_t>(home));
    }
  }
  for (const std::int64_t sample : anywhere) {
    std::size_t least = nodes.size();  // the node with the fewest chunks per processor
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      const auto load = [&](std::size_t of, std::size_t with) {
        return near[of].size() * static_cast<std::size_t>(processors[with]);
      };
      if (processors[i] > 0 && (least == nodes.size() || load(i, least) < load(least, i))) {
        least = i;
      }
    }
    add(sample, least);
  }
  std::vector<std::int64_t> counts;
  counts.reserve(near.size());
  for (const auto& own : near) {
    counts.push_back(static_cast<std::int64_t>(own.size()));
  }
  const std::vector<int> divided = divide_threads(threads, counts, processors);
  NumaPlan plan;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const auto begin = static_cast<std::int64_t>(plan.order.size());
    plan.order.insert(plan.order.end(), near[i].begin(), near[i].end());
    if (divided[i] > 0 || !near[i].empty()) {
      plan.shares.push_back({nodes[i], divided[i], begin, static_cast<std::int64_t>(plan.order.size())});
    }
  }
  return plan;
}

OnNode::OnNode(const CpuNode& node) {
  CPU_ZERO(&before_);
  if (sched_getaffinity(0, sizeof before_, &before_) != 0) {
    return;
  }
  cpu_set_t narrowed;
  CPU_AND(&narrowed, &before_, &node.cpus);
  changed_ = CPU_COUNT(&narrowed) > 0 && CPU_EQUAL(&narrowed, &before_) == 0 &&
             sched_setaffinity(0, sizeof narrowed, &narrowed) == 0;
}

OnNode::~OnNode() {
  if (changed_) {
    (void)sched_setaffinity(0, sizeof before_, &before_);
  }
}

bool runs_on(const CpuNode& node) {
  const int cpu = sched_getcpu();
  return cpu >= 0 && cpu < CPU_SETSIZE && CPU_ISSET(cpu, &node.cpus) != 0;
}

ChunkCounts numa_chunk_counts() { return {chunks_near.load(), chunks_elsewhere.load()}; }

void count_chunks(std::int64_t near, std::int64_t elsewhere) {
  chunks_near += near;
  chunks_elsewhere += elsewhere;
}

}  // namespace memascend
