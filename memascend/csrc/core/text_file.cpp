#include "text_file.h"

#include <array>
#include <cstdio>

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

}  // namespace memascend
