#include "mesh.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "gloo/alltoall.h"
#include "gloo/transport/address.h"
#include "gloo/transport/context.h"
#include "gloo/transport/pair.h"

namespace horovod {
namespace common {

namespace {
// Room for an address of whatever transport.
constexpr size_t ROOM = gloo::transport::Address::kMaxByteSize;

class ConnectedContext : public gloo::Context {
public:
  ConnectedContext(int rank, int size, const Connecting& connecting,
                   const Exchange& exchange)
      : gloo::Context(rank, size) {
    setTimeout(connecting.timeout);
    device_ = connecting.device;
    transportContext_ = device_->createContext(rank, size);
    transportContext_->setTimeout(connecting.timeout);
    std::vector<char> addresses(size * ROOM);
    for (int other = 0; other < size; ++other) {
      if (other != rank) {
        auto address = transportContext_->createPair(other)->address().bytes();
        length_ = address.size();
        std::copy(address.begin(), address.end(), &addresses[other * ROOM]);
      }
    }
    auto found = exchange(addresses);
    if (found.size() != addresses.size()) {
      throw std::runtime_error("The ranks have not learned their addresses.");
    }
    for (int other = 0; other < size; ++other) {
      if (other != rank) {
        auto begin = found.begin() + other * ROOM;
        transportContext_->getPair(other)->connect({begin, begin + length_});
      }
    }
  }

private:
  size_t length_ = 0;
};

std::vector<char> ExchangeOver(const std::shared_ptr<gloo::Context>& parent,
                               std::vector<char> to_all) {
  std::vector<char> from_all(to_all.size());
  gloo::AlltoallOptions opts(parent);
  opts.setInput(to_all.data(), to_all.size());
  opts.setOutput(from_all.data(), from_all.size());
  gloo::alltoall(opts);
  return from_all;
}
} // namespace

std::shared_ptr<gloo::Context> Mesh(int rank, int size,
                                    const Connecting& connecting,
                                    const Exchange& exchange) {
  return std::make_shared<ConnectedContext>(rank, size, connecting, exchange);
}

std::shared_ptr<gloo::Context>
MeshAmong(const std::shared_ptr<gloo::Context>& parent,
          const std::vector<int>& members, const Connecting& connecting) {
  // Whether all ranks have one context is the same on all of them.
  if (members.size() == static_cast<size_t>(parent->size)) {
    return parent;
  }
  std::vector<char> to_all(parent->size * ROOM);
  auto me = std::find(members.begin(), members.end(), parent->rank);
  if (me == members.end()) {
    ExchangeOver(parent, to_all);
    return nullptr;
  }
  auto exchange = [&](const std::vector<char>& addresses) {
    for (size_t i = 0; i < members.size(); ++i) {
      std::copy_n(&addresses[i * ROOM], ROOM, &to_all[members[i] * ROOM]);
    }
    auto from_all = ExchangeOver(parent, to_all);
    std::vector<char> found;
    for (int member : members) {
      std::copy_n(&from_all[member * ROOM], ROOM, std::back_inserter(found));
    }
    return found;
  };
  return Mesh(static_cast<int>(std::distance(members.begin(), me)),
              static_cast<int>(members.size()), connecting, exchange);
}

} // namespace common
} // namespace horovod
