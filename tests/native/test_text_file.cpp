#include "core/text_file.h"

#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "check.h"

using namespace memascend;

TEST(text_file_has_the_kernels_lists_and_rows_of_numbers) {
  CHECK((listed("0-3,8\n") == std::vector<int>{0, 1, 2, 3, 8}));
  CHECK((listed("5") == std::vector<int>{5}));
  CHECK(listed("\n").empty());
  CHECK(listed("").empty());
  CHECK((listed("1,x,3") == std::vector<int>{1}));
  CHECK((numbers_of("10 21\t21\n") == std::vector<int>{10, 21, 21}));
  CHECK(numbers_of("").empty());
}

TEST(text_file_is_read_whole_and_is_empty_where_there_is_none) {
  std::string path = "/tmp/memascend-text-file-" + std::to_string(getpid());
  std::string text(10000, 'a');
  std::FILE* file = std::fopen(path.c_str(), "w");
  std::fwrite(text.data(), 1, text.size(), file);
  std::fclose(file);
  CHECK(text_of(path) == text);
  std::remove(path.c_str());
  CHECK(text_of(path).empty());
}
