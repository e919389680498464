#include "text_file.h"

#include <array>
#include <cstdio>
#include <cstdlib>

namespace memascend {

std::string text_of(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "re");
  if (file == nullptr) {
    return {};
  }
  std::string text;
  std::array<char, 4096> part{};
  for (std::size_t got = 0; (got = std::fread(part.data(), 1, part.size(), file)) > 0;) {
    text.append(part.data(), got);
  }
  std::fclose(file);
  return text;
}

std::vector<int> numbers_of(const std::string& text) {
  std::vector<int> numbers;
  const char* at = text.c_str();
  for (char* end = nullptr;; at = end) {
    const long number = std::strtol(at, &end, 10);
    if (end == at) {
      return numbers;
    }
    numbers.push_back(static_cast<int>(number));
  }
}

std::vector<int> listed(const std::string& text) {
  std::vector<int> numbers;
  for (const char* at = text.c_str();;) {
    char* end = nullptr;
    const long first = std::strtol(at, &end, 10);
    if (end == at) {
      return numbers;
    }
    const long last = *end == '-' ? std::strtol(end + 1, &end, 10) : first;
    for (long number = first; number <= last; ++number) {
      numbers.push_back(static_cast<int>(number));
    }
    if (*end != ',') {
      return numbers;
    }
    at = end + 1;
  }
}

}  // namespace memascend
