#include "core/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>

#include "core/buffer.h"

namespace trivet {
namespace {

constexpr uint64_t kMagic = 0x314e455241565254;  // "TRVAREN1"
constexpr int64_t kMaxBytes = int64_t{1} << 46;

struct Header {
    uint64_t magic;
    int32_t num_layers, num_kv_heads, head_dim, kind, num_pages, num_workers;
};

// Offsets of the parts of the file.
struct Offsets {
    int64_t progress, columns, pages, end;
};

Offsets offsets(const ArenaGeometry& g) {
    Offsets at{};
    at.progress = round_up(int64_t{sizeof(Header)}, 64);
    at.columns = round_up(at.progress + int64_t{g.num_workers} * 64, 4096);
    at.pages = at.columns + g.num_workers * round_up(int64_t{g.num_pages} * 4, 4096);
    const int64_t rows = int64_t{g.num_layers} * g.num_kv_heads;
    at.end = at.pages + round_up(rows * g.num_pages * page_block(g.kind, g.head_dim).bytes, 4096);
    return at;
}

void check(const ArenaGeometry& g) {
    auto require = [](bool holds, const char* what) {
        if (!holds) throw std::invalid_argument(std::string("arena: ") + what);
    };
    require(g.num_layers >= 1 && g.num_layers <= 65536, "num_layers must be 1 to 65536");
    require(g.num_kv_heads >= 1 && g.num_kv_heads <= 65536, "num_kv_heads must be 1 to 65536");
    require(g.head_dim >= 2 && g.head_dim <= 4096 && g.head_dim % 2 == 0,
            "head_dim must be even, 2 to 4096");
    require(is_kv_kind(static_cast<int32_t>(g.kind)), "the KV format is not known");
    require(g.num_pages >= 1, "num_pages must be at least 1");
    require(g.num_workers >= 1 && g.num_workers <= 4096, "num_workers must be 1 to 4096");
    const double bytes = static_cast<double>(g.num_layers) * g.num_kv_heads * g.num_pages *
                         static_cast<double>(page_block(g.kind, g.head_dim).bytes);
    require(bytes < static_cast<double>(kMaxBytes), "more memory than an address space holds");
}

std::system_error last_error(const char* what) {
    return std::system_error(errno, std::generic_category(), what);
}

}  // namespace

Arena::Arena(const ArenaGeometry& geometry, int32_t worker) : geometry_(geometry), worker_(worker) {
    check(geometry);
    if (worker < 0 || worker >= geometry.num_workers) {
        throw std::invalid_argument("arena: worker must be below num_workers");
    }
    fd_ = memfd_create("trivet-kv", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd_ < 0) throw last_error("arena: memfd_create");
    try {
        const int64_t bytes = offsets(geometry).end;
        if (ftruncate(fd_, bytes) != 0) throw last_error("arena: ftruncate");
        if (fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
            throw last_error("arena: sealing the size");
        }
        map(bytes);
    } catch (...) {
        close(fd_);
        throw;
    }
    const Header header = {kMagic,
                           geometry.num_layers,
                           geometry.num_kv_heads,
                           geometry.head_dim,
                           static_cast<int32_t>(geometry.kind),
                           geometry.num_pages,
                           geometry.num_workers};
    std::memcpy(base_, &header, sizeof header);
    lay_out();
}

Arena::Arena(int fd, int32_t worker) : worker_(worker) {
    struct stat status;
    if (fstat(fd, &status) != 0) throw last_error("arena: descriptor");
    const int seals = fcntl(fd, F_GET_SEALS);
    Header header;
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 ||
        pread(fd, &header, sizeof header, 0) != static_cast<ssize_t>(sizeof header) ||
        header.magic != kMagic) {
        throw std::invalid_argument("arena: the descriptor is not a KV arena");
    }
    geometry_ = {header.num_layers, header.num_kv_heads,
                 header.head_dim,   static_cast<KvKind>(header.kind),
                 header.num_pages,  header.num_workers};
    check(geometry_);
    if (worker < 0 || worker >= geometry_.num_workers) {
        throw std::invalid_argument("arena: worker must be below num_workers");
    }
    if (offsets(geometry_).end != status.st_size) {
        throw std::invalid_argument("arena: the file's size does not fit its header");
    }
    fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (fd_ < 0) throw last_error("arena: duplicating the descriptor");
    try {
        map(status.st_size);
    } catch (...) {
        close(fd_);
        throw;
    }
    lay_out();
}

Arena::~Arena() {
    munmap(base_, static_cast<size_t>(file_bytes_));
    close(fd_);
}

void Arena::map(int64_t bytes) {
    void* base =
        mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (base == MAP_FAILED) throw last_error("arena: mmap");
    base_ = static_cast<uint8_t*>(base);
    file_bytes_ = bytes;
}

void Arena::lay_out() {
    const Offsets at = offsets(geometry_);
    progress_ = reinterpret_cast<uint64_t*>(base_ + at.progress);
    columns_ = reinterpret_cast<uint32_t*>(base_ + at.columns);
    pages_ = base_ + at.pages;
    block_bytes_ = page_block(geometry_.kind, geometry_.head_dim).bytes;
}

std::atomic_ref<uint32_t> Arena::cell(int32_t worker, int32_t page) const {
    const int64_t stride = round_up(int64_t{geometry_.num_pages} * 4, 4096) / 4;
    return std::atomic_ref<uint32_t>(columns_[worker * stride + page]);
}

int64_t Arena::total_refs(int32_t page) const {
    int64_t total = 0;
    for (int32_t w = 0; w < geometry_.num_workers; ++w) total += cell(w, page).load();
    return total;
}

int32_t Arena::refs(int32_t worker, int32_t page) const {
    return static_cast<int32_t>(cell(worker, page).load());
}

void Arena::add_ref(int32_t page) { cell(worker_, page).fetch_add(1); }

bool Arena::drop_ref(int32_t page) {
    std::atomic_ref<uint32_t> count = cell(worker_, page);
    if (count.load() == 0) return false;
    count.fetch_sub(1);
    return true;
}

void Arena::clear_column(int32_t worker) {
    for (int32_t page = 0; page < geometry_.num_pages; ++page) cell(worker, page).store(0);
}

void Arena::copy_page(int32_t from, int32_t to) {
    for (int32_t layer = 0; layer < geometry_.num_layers; ++layer) {
        for (int32_t head = 0; head < geometry_.num_kv_heads; ++head) {
            std::memcpy(block(layer, head, to), block(layer, head, from),
                        static_cast<size_t>(block_bytes_));
        }
    }
}

uint64_t Arena::progress(int32_t worker) const {
    return std::atomic_ref<uint64_t>(progress_[worker * 8]).load(std::memory_order_acquire);
}

void Arena::set_progress(uint64_t value) {
    std::atomic_ref<uint64_t>(progress_[worker_ * 8]).store(value, std::memory_order_release);
}

}  // namespace trivet
