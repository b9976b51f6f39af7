// How long an index in memory takes to come back from its snapshot: one program, one kind of index a run.
//
//     recovery KIND SNAPSHOT QUERY STARTED
//
// KIND: directory   routing entries and rows, as our index has them: read, then a hash map of growable lists built
//       frozen      the same, the lists left where they were read: the least that any rebuilding can do
//       blocks      DRAM-BlockHash: a flat map from block ID to 16 bytes, each entry inserted
//       image       DRAM-BlockHash again, but the map's own memory was saved and is read back as it was
//       radix       Segment-Radix: an exact radix tree whose edges are the parts of segments that no other has
//
// QUERY is a sequence that is in the index: u64 count, the slot of its last segment, block IDs. STARTED is the time
// (CLOCK_MONOTONIC, ns) at which this process was started. Prints one line of JSON. Files are little-endian; their
// formats are beside the structures that are read, and written by bench/scale/snapshots.py.
//
// No strawman: one read of the whole file into memory that the kernel may back by huge pages, tables made at their final
// size, and the slots that the next entries will need are prefetched.

#include <algorithm>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <vector>

namespace {

constexpr size_t AHEAD = 16;      // entries whose slots are prefetched
constexpr size_t READ = 16 << 20; // bytes a read

[[noreturn]] void fail(const std::string &what)
{
    std::fprintf(stderr, "recovery: %s\n", what.c_str());
    std::exit(1);
}

uint64_t now_ns()
{
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return uint64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

// Not from getrusage: that counts the process that forked this one, too.
uint64_t resident_bytes_max()
{
    std::FILE *status = std::fopen("/proc/self/status", "r");
    char line[256];
    unsigned long kilobytes = 0;
    while (status != nullptr && std::fgets(line, sizeof line, status))
        if (std::sscanf(line, "VmHWM: %lu kB", &kilobytes) == 1)
            break;
    return uint64_t(kilobytes) * 1024;
}

void *memory(size_t bytes)
{
    if (bytes == 0)
        bytes = 1;
    void *at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        fail("out of memory");
    madvise(at, bytes, MADV_HUGEPAGE);
    return at;
}

class File {
public:
    explicit File(const char *path) : descriptor_(open(path, O_RDONLY | O_CLOEXEC))
    {
        if (descriptor_ < 0)
            fail(std::string("cannot open ") + path);
        posix_fadvise(descriptor_, 0, 0, POSIX_FADV_SEQUENTIAL);
    }
    ~File() { close(descriptor_); }

    void read_into(void *to, size_t bytes)
    {
        auto *at = static_cast<char *>(to);
        while (bytes) {
            const ssize_t got = ::read(descriptor_, at, std::min(bytes, READ));
            if (got <= 0)
                fail("the file is too short");
            at += got;
            bytes -= got;
        }
    }

    template <typename T> T *column(size_t count)
    {
        T *values = static_cast<T *>(memory(count * sizeof(T)));
        read_into(values, count * sizeof(T));
        return values;
    }

    uint64_t number()
    {
        uint64_t value;
        read_into(&value, sizeof value);
        return value;
    }

private:
    int descriptor_;
};

uint64_t mixed(uint64_t key) { return (key ^ (key >> 32)) * 0x9E3779B97F4A7C15ULL; }

// From mixed keys to 0..size-1, for any size: a table need not be a power of two.
size_t home(uint64_t key, size_t size) { return size_t((unsigned __int128)mixed(key) * size >> 64); }

struct Query {
    uint64_t slot;
    std::vector<uint64_t> ids;
};

// --- directory: u64 lists, postings, rows; then columns: keys, counts (u32), filters (high, low), slots (u32), rows --------

struct Row { // the segment table's
    uint64_t image, delta;
    uint32_t parent, origin, children, name_space;
    uint16_t window, tag;
    uint8_t fork, count;
    uint16_t reserved;
};
static_assert(sizeof(Row) == 40, "as in memory");

struct Posting {
    uint64_t high, low;
    uint32_t slot;
};

class Directory {
public:
    Directory(File &file, bool frozen)
    {
        lists_ = file.number();
        const uint64_t postings = file.number();
        segments_ = file.number();
        const auto *keys = file.column<uint64_t>(lists_);
        const auto *counts = file.column<uint32_t>(lists_);
        high_ = file.column<uint64_t>(postings);
        low_ = file.column<uint64_t>(postings);
        slot_ = file.column<uint32_t>(postings);
        rows_ = file.column<Row>(segments_);
        size_ = lists_ * 5 / 4 + 1;
        table_ = static_cast<Entry *>(memory(size_ * sizeof(Entry)));
        uint64_t begin = 0;
        for (uint64_t i = 0; i < lists_; i++) {
            if (i + AHEAD < lists_)
                __builtin_prefetch(&table_[home(keys[i + AHEAD], size_)], 1);
            size_t at = home(keys[i], size_);
            while (table_[at].count)
                at = at + 1 == size_ ? 0 : at + 1;
            table_[at].key = keys[i];
            table_[at].count = counts[i];
            if (frozen) {
                table_[at].begin = begin;
            } else {
                auto *list = static_cast<Posting *>(std::malloc(counts[i] * sizeof(Posting)));
                if (list == nullptr)
                    fail("out of memory");
                for (uint32_t j = 0; j < counts[i]; j++)
                    list[j] = {high_[begin + j], low_[begin + j], slot_[begin + j]};
                table_[at].list = list;
            }
            begin += counts[i];
        }
        frozen_ = frozen;
    }

    // The segment that a query's last window is in: its list holds it, and its row is there.
    bool answers(const Query &query) const
    {
        for (size_t block = query.ids.size() - 1;; block--) {
            const Entry *entry = find(query.ids[block] & ~uint64_t(0xFFFF));
            if (entry != nullptr) {
                for (uint32_t j = 0; j < entry->count; j++) {
                    const uint32_t slot = frozen_ ? slot_[entry->begin + j] : entry->list[j].slot;
                    if (slot == query.slot)
                        return rows_[slot - 4096].count > 0;
                }
                return false;
            }
            if (block == 0)
                return false;
        }
    }

private:
    struct Entry {
        uint64_t key;
        union {
            uint64_t begin;
            Posting *list;
        };
        uint32_t count;
    };
    uint64_t lists_, segments_;
    size_t size_;
    Entry *table_;
    const uint64_t *high_, *low_;
    const uint32_t *slot_;
    const Row *rows_;
    bool frozen_;

    const Entry *find(uint64_t key) const
    {
        size_t at = home(key, size_);
        while (table_[at].count && table_[at].key != key)
            at = at + 1 == size_ ? 0 : at + 1;
        return table_[at].count ? &table_[at] : nullptr;
    }
};

// --- blocks: u64 blocks; then for each its ID and 16 bytes. image: u64 blocks, slots of the table; then the table ----------

struct Block {
    uint64_t id;
    uint64_t metadata[2]; // never all 0
};

class BlockMap {
public:
    static constexpr double FULL = 0.8;

    explicit BlockMap(uint64_t blocks) : size_(size_t(blocks / FULL) + 1)
    {
        table_ = static_cast<Block *>(memory(size_ * sizeof(Block)));
    }

    BlockMap(File &file, size_t size) : size_(size) { table_ = file.column<Block>(size_); }

    void load(File &file, uint64_t blocks)
    {
        const size_t batch = READ / sizeof(Block);
        std::vector<Block> some(batch);
        for (uint64_t done = 0; done < blocks; done += batch) {
            const size_t count = std::min<uint64_t>(batch, blocks - done);
            file.read_into(some.data(), count * sizeof(Block));
            for (size_t i = 0; i < count; i++) {
                if (i + AHEAD < count)
                    __builtin_prefetch(&table_[home(some[i + AHEAD].id, size_)], 1);
                insert(some[i]);
            }
        }
    }

    void insert(const Block &block)
    {
        size_t at = home(block.id, size_);
        while (table_[at].metadata[1]) {
            if (table_[at].id == block.id)
                break;
            at = at + 1 == size_ ? 0 : at + 1;
        }
        table_[at] = block;
    }

    bool answers(const Query &query) const
    {
        return std::all_of(query.ids.begin(), query.ids.end(), [this](uint64_t id) { return contains(id); });
    }

    void save(const char *path, uint64_t blocks) const
    {
        std::FILE *file = std::fopen(path, "wb");
        const uint64_t head[2] = {blocks, size_};
        if (file == nullptr || std::fwrite(head, sizeof head, 1, file) != 1
            || std::fwrite(table_, sizeof(Block), size_, file) != size_ || std::fflush(file) || fsync(fileno(file)))
            fail(std::string("cannot write ") + path);
        std::fclose(file);
    }

private:
    size_t size_;
    Block *table_;

    bool contains(uint64_t id) const
    {
        size_t at = home(id, size_);
        while (table_[at].metadata[1] && table_[at].id != id)
            at = at + 1 == size_ ? 0 : at + 1;
        return table_[at].metadata[1] != 0;
    }
};

// --- radix: u64 nodes, blocks; then columns: parents (u32, 0: none), places (u64), counts (u16), the IDs of all edges ------

class Radix {
public:
    explicit Radix(File &file)
    {
        nodes_ = file.number();
        const uint64_t blocks = file.number();
        const auto *parents = file.column<uint32_t>(nodes_);
        const auto *places = file.column<uint64_t>(nodes_);
        const auto *counts = file.column<uint16_t>(nodes_);
        ids_ = file.column<uint64_t>(blocks);
        node_ = static_cast<Node *>(memory((nodes_ + 1) * sizeof(Node)));
        size_ = nodes_ * 5 / 4 + 1;
        child_ = static_cast<uint32_t *>(memory(size_ * sizeof(uint32_t)));
        uint64_t begin = 0, ahead = 0;
        uint64_t ahead_node = 0;
        for (uint64_t i = 0; i < nodes_; i++) {
            for (; ahead_node < std::min(nodes_, i + AHEAD); ahead += counts[ahead_node++])
                __builtin_prefetch(&child_[home(ids_[ahead] ^ parents[ahead_node], size_)], 1);
            node_[i + 1] = {begin, places[i], parents[i], counts[i]};
            size_t at = home(ids_[begin] ^ parents[i], size_);
            while (child_[at])
                at = at + 1 == size_ ? 0 : at + 1;
            child_[at] = uint32_t(i + 1);
            begin += counts[i];
        }
    }

    bool answers(const Query &query) const
    {
        uint32_t parent = 0;
        size_t matched = 0;
        while (matched < query.ids.size()) {
            const uint32_t node = find(parent, query.ids[matched]);
            if (node == 0)
                return false;
            const size_t count = std::min<size_t>(node_[node].count, query.ids.size() - matched);
            if (std::memcmp(ids_ + node_[node].begin, query.ids.data() + matched, count * sizeof(uint64_t)))
                return false;
            matched += count;
            parent = node;
        }
        return true;
    }

private:
    struct Node {
        uint64_t begin; // of its edge, in ids_
        uint64_t place; // of its segment on the disk
        uint32_t parent;
        uint32_t count;
    };
    uint64_t nodes_;
    const uint64_t *ids_;
    Node *node_;
    size_t size_;
    uint32_t *child_; // a table of nodes by (parent, first ID of the edge); 0: free

    uint32_t find(uint32_t parent, uint64_t first) const
    {
        size_t at = home(first ^ parent, size_);
        while (child_[at] && (node_[child_[at]].parent != parent || ids_[node_[child_[at]].begin] != first))
            at = at + 1 == size_ ? 0 : at + 1;
        return child_[at];
    }
};

template <typename Index> void ask(const Index &index, const Query &query, uint64_t main_ns, uint64_t started)
{
    const uint64_t ready = now_ns();
    if (!index.answers(query))
        fail("the query's sequence is not in the index");
    const uint64_t answered = now_ns();
    std::printf(
        "{\"open_s\": %.6f, \"process_s\": %.6f, \"query_us\": %.1f, \"resident_bytes\": %" PRIu64 "}\n",
        (answered - main_ns) / 1e9, (answered - started) / 1e9, (answered - ready) / 1e3, resident_bytes_max()
    );
}

} // namespace

int main(int count, char **arguments)
{
    const uint64_t main_ns = now_ns();
    if (count != 5)
        fail("usage: recovery KIND SNAPSHOT QUERY STARTED");
    const std::string kind = arguments[1];
    if (kind == "save-image") { // SNAPSHOT of blocks -> QUERY, a file to write
        File file(arguments[2]);
        const uint64_t blocks = file.number();
        BlockMap map(blocks);
        map.load(file, blocks);
        map.save(arguments[3], blocks);
        return 0;
    }
    Query query;
    {
        File file(arguments[3]);
        query.ids.resize(file.number());
        query.slot = file.number();
        file.read_into(query.ids.data(), query.ids.size() * sizeof(uint64_t));
    }
    const uint64_t started = std::strtoull(arguments[4], nullptr, 10);
    File file(arguments[2]);
    if (kind == "directory" || kind == "frozen") {
        ask(Directory(file, kind == "frozen"), query, main_ns, started);
    } else if (kind == "blocks") {
        const uint64_t blocks = file.number();
        BlockMap map(blocks);
        map.load(file, blocks);
        ask(map, query, main_ns, started);
    } else if (kind == "image") {
        file.number();
        const uint64_t slots = file.number();
        ask(BlockMap(file, slots), query, main_ns, started);
    } else if (kind == "radix") {
        ask(Radix(file), query, main_ns, started);
    } else {
        fail("no such kind: " + kind);
    }
    std::fflush(stdout);
    _exit(0); // giving back gigabytes is not part of coming back
}
