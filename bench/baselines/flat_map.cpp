// DRAM-BlockHash in C++: an open-addressing map from block ID to the workers that hold it.
//
// One slot of 24 bytes a block, so that a lookup touches one cache line, rarely two; slots that a query will need are
// prefetched. Three holders fit into the slot. A block with more names a sorted list of all of them. Blocks with the same
// holders share one list: those of a hot system prompt all do, and then a match sees at once that nothing changed.
// Linear probing, a power-of-two table, at most 70 % full. IDs are scrambled before they choose a slot: callers may
// bring IDs that are not uniform. Blocks are never removed: the benchmark does not ask for it.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <new>
#include <unordered_map>
#include <vector>

namespace {

constexpr uint32_t NONE = UINT32_MAX;
constexpr uint32_t INLINE_HOLDERS = 3;
constexpr size_t PREFETCH_BLOCKS = 12;

struct Slot {
    uint64_t id;
    uint32_t holders[INLINE_HOLDERS]; // from the front, then NONE; an empty slot has none
    uint32_t list;                    // NONE, or the number of the list that stands for `holders`, which are then {0}

    bool empty() const { return holders[0] == NONE; }
    bool same_holders(const Slot &other) const
    {
        return std::memcmp(holders, other.holders, sizeof holders + sizeof list) == 0;
    }
};
static_assert(sizeof(Slot) == 24, "a slot is three words");

constexpr Slot EMPTY = {0, {NONE, NONE, NONE}, NONE};

struct Reach {
    uint32_t worker;
    uint32_t blocks;
};

class FlatMap {
public:
    FlatMap() { resize(1024); }

    size_t size() const { return used_; }
    size_t bytes() const
    {
        size_t total = slots_.capacity() * sizeof(Slot) + joined_.size() * 32;
        for (const auto &list : lists_) // each is kept twice, and the copy's tree node is about as large as a vector
            total += 2 * (list.capacity() * sizeof(uint32_t) + sizeof list) + 48;
        return total;
    }

    void insert(const uint8_t *ids, size_t blocks, uint32_t worker)
    {
        prefetch(ids, 0, std::min(blocks, PREFETCH_BLOCKS));
        for (size_t i = 0; i < blocks; i++) {
            if (i + PREFETCH_BLOCKS < blocks)
                prefetch(ids, i + PREFETCH_BLOCKS, i + PREFETCH_BLOCKS + 1);
            const uint64_t id = id_at(ids, i);
            size_t at = find(id);
            if (!slots_[at].empty()) {
                add_holder(slots_[at], worker);
                continue;
            }
            if ((used_ + 1) * 10 > slots_.size() * 7) {
                resize(slots_.size() * 2);
                at = find(id);
            }
            slots_[at] = {id, {worker, NONE, NONE}, NONE};
            used_++;
        }
    }

    // Who holds how much goes into `reached`, the longest first, then by worker.
    size_t match(const uint8_t *ids, size_t blocks, std::vector<Reach> &reached)
    {
        reached.clear();
        alive_.clear();
        prefetch(ids, 0, std::min(blocks, PREFETCH_BLOCKS));
        size_t i = 0;
        Slot before = EMPTY;
        for (; i < blocks; i++) {
            if (i + PREFETCH_BLOCKS < blocks)
                prefetch(ids, i + PREFETCH_BLOCKS, i + PREFETCH_BLOCKS + 1);
            const Slot &slot = slots_[find(id_at(ids, i))];
            if (slot.empty())
                break;
            if (i == 0)
                copy_holders(slot);
            else if (!alive_.empty() && !slot.same_holders(before))
                keep_holders_of(slot, static_cast<uint32_t>(i), reached);
            before = slot;
        }
        for (uint32_t worker : alive_)
            reached.push_back({worker, static_cast<uint32_t>(i)});
        std::sort(reached.begin(), reached.end(), [](const Reach &a, const Reach &b) {
            return a.blocks != b.blocks ? a.blocks > b.blocks : a.worker < b.worker;
        });
        return i;
    }

private:
    std::vector<Slot> slots_;
    std::vector<std::vector<uint32_t>> lists_; // sorted, all different, never changed
    std::map<std::vector<uint32_t>, uint32_t> list_numbers_;
    std::unordered_map<uint64_t, uint32_t> joined_; // list and worker -> the list with that worker as well
    uint64_t last_join_ = UINT64_MAX;               // the key last asked of `joined_`: a run of blocks asks the same
    uint32_t last_joined_ = NONE;
    std::vector<uint32_t> alive_; // workers whose prefix has not ended yet
    size_t used_ = 0;
    int shift_ = 0;

    static uint64_t id_at(const uint8_t *ids, size_t i)
    {
        uint64_t id;
        std::memcpy(&id, ids + 8 * i, sizeof id);
        return id;
    }

    size_t home(uint64_t id) const
    {
        id ^= id >> 32;
        return (id * 0x9E3779B97F4A7C15ULL) >> shift_;
    }

    void prefetch(const uint8_t *ids, size_t first, size_t end) const
    {
        for (size_t i = first; i < end; i++)
            __builtin_prefetch(&slots_[home(id_at(ids, i))]);
    }

    // The slot of this ID, or the empty slot where it belongs. There always is one: the table is never full.
    size_t find(uint64_t id) const
    {
        size_t at = home(id);
        while (!slots_[at].empty() && slots_[at].id != id)
            at = (at + 1) & (slots_.size() - 1);
        return at;
    }

    void resize(size_t slots)
    {
        std::vector<Slot> before(slots, EMPTY);
        before.swap(slots_);
        shift_ = 64 - __builtin_ctzll(slots);
        for (const Slot &slot : before)
            if (!slot.empty())
                slots_[find(slot.id)] = slot;
    }

    void add_holder(Slot &slot, uint32_t worker)
    {
        if (slot.list == NONE) {
            for (uint32_t &holder : slot.holders) {
                if (holder == worker)
                    return;
                if (holder == NONE) {
                    holder = worker;
                    return;
                }
            }
            std::vector<uint32_t> list(slot.holders, slot.holders + INLINE_HOLDERS);
            list.push_back(worker);
            std::sort(list.begin(), list.end());
            slot = {slot.id, {0, NONE, NONE}, number_of(list)};
            return;
        }
        const uint64_t join = (uint64_t{slot.list} << 32) | worker;
        if (join != last_join_) {
            const auto known = joined_.find(join);
            if (known != joined_.end()) {
                last_joined_ = known->second;
            } else {
                std::vector<uint32_t> list = lists_[slot.list];
                const auto at = std::lower_bound(list.begin(), list.end(), worker);
                if (at == list.end() || *at != worker)
                    list.insert(at, worker);
                last_joined_ = number_of(list);
                joined_.emplace(join, last_joined_);
            }
            last_join_ = join;
        }
        slot.list = last_joined_;
    }

    uint32_t number_of(const std::vector<uint32_t> &list)
    {
        const auto [at, is_new] = list_numbers_.emplace(list, static_cast<uint32_t>(lists_.size()));
        if (is_new)
            lists_.push_back(list);
        return at->second;
    }

    void copy_holders(const Slot &slot)
    {
        if (slot.list != NONE) {
            alive_ = lists_[slot.list];
            return;
        }
        for (uint32_t holder : slot.holders)
            if (holder != NONE)
                alive_.push_back(holder);
        std::sort(alive_.begin(), alive_.end());
    }

    // Drop the workers that do not hold this block: their prefix has `blocks` blocks. `alive_` stays sorted.
    void keep_holders_of(const Slot &slot, uint32_t blocks, std::vector<Reach> &reached)
    {
        const uint32_t *holder = slot.holders;
        const uint32_t *end = slot.holders + INLINE_HOLDERS;
        const bool sorted = slot.list != NONE;
        if (sorted) {
            holder = lists_[slot.list].data();
            end = holder + lists_[slot.list].size();
        }
        size_t kept = 0;
        for (uint32_t worker : alive_) {
            bool held;
            if (sorted) { // both are: one walk through the two
                while (holder != end && *holder < worker)
                    holder++;
                held = holder != end && *holder == worker;
            } else {
                held = std::find(holder, end, worker) != end;
            }
            if (held)
                alive_[kept++] = worker;
            else
                reached.push_back({worker, blocks});
        }
        alive_.resize(kept);
    }
};

struct Handle {
    FlatMap map;
    std::vector<Reach> reached;
};

} // namespace

extern "C" {

void *flat_map_new() { return new (std::nothrow) Handle; }

void flat_map_delete(void *handle) { delete static_cast<Handle *>(handle); }

void flat_map_insert(void *handle, const uint8_t *ids, uint64_t first, uint64_t end, uint32_t worker)
{
    static_cast<Handle *>(handle)->map.insert(ids + 8 * first, end - first, worker);
}

// Returns the matched blocks. `reached` gets up to `room` pairs of worker and blocks, `*count` how many there are.
uint64_t flat_map_match(void *handle, const uint8_t *ids, uint64_t blocks, Reach *reached, uint64_t room, uint64_t *count)
{
    auto &state = *static_cast<Handle *>(handle);
    const uint64_t matched = state.map.match(ids, blocks, state.reached);
    *count = state.reached.size();
    std::copy_n(state.reached.begin(), std::min<uint64_t>(room, *count), reached);
    return matched;
}

uint64_t flat_map_size(void *handle) { return static_cast<Handle *>(handle)->map.size(); }

uint64_t flat_map_bytes(void *handle) { return static_cast<Handle *>(handle)->map.bytes(); }

} // extern "C"
