#include "signature.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <random>

namespace horovod {
namespace common {

namespace {

const std::string kNonce = "Horovod-Nonce: ";
const std::string kDigest = "Horovod-Digest: ";
const std::string kSignature = "Horovod-Signature: ";
constexpr size_t kBlock = 64;

constexpr std::array<uint32_t, 64> kRounds = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1,
    0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3,
    0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786,
    0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13,
    0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
    0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a,
    0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t Rotated(uint32_t x, int n) { return x >> n | x << (32 - n); }

void Compress(std::array<uint32_t, 8>& state, const unsigned char* block) {
  std::array<uint32_t, 64> w;
  for (size_t i = 0; i < 16; ++i) {
    w[i] = uint32_t(block[4 * i]) << 24 | uint32_t(block[4 * i + 1]) << 16 |
           uint32_t(block[4 * i + 2]) << 8 | uint32_t(block[4 * i + 3]);
  }
  for (size_t i = 16; i < 64; ++i) {
    uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + (Rotated(a, 7) ^ Rotated(a, 18) ^ a >> 3) + w[i - 7] +
           (Rotated(b, 17) ^ Rotated(b, 19) ^ b >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (size_t i = 0; i < 64; ++i) {
    uint32_t one = h + (Rotated(e, 6) ^ Rotated(e, 11) ^ Rotated(e, 25)) +
                   ((e & f) ^ (~e & g)) + kRounds[i] + w[i];
    uint32_t two = (Rotated(a, 2) ^ Rotated(a, 13) ^ Rotated(a, 22)) +
                   ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
  }
  const std::array<uint32_t, 8> mixed = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < state.size(); ++i) {
    state[i] += mixed[i];
  }
}

std::string Digest(std::string message) {
  std::array<uint32_t, 8> state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372,
                                   0xa54ff53a, 0x510e527f, 0x9b05688c,
                                   0x1f83d9ab, 0x5be0cd19};
  const uint64_t bits = 8 * uint64_t(message.size());
  message += '\x80';
  while (message.size() % kBlock != kBlock - 8) {
    message += '\0';
  }
  for (int shift = 56; shift >= 0; shift -= 8) {
    message += char(bits >> shift);
  }
  for (size_t i = 0; i < message.size(); i += kBlock) {
    Compress(state, reinterpret_cast<const unsigned char*>(&message[i]));
  }
  std::string digest;
  for (uint32_t word : state) {
    for (int shift = 24; shift >= 0; shift -= 8) {
      digest += char(word >> shift);
    }
  }
  return digest;
}

std::string Hexadecimal(const std::string& bytes) {
  const char* digits = "0123456789abcdef";
  std::string text;
  for (unsigned char byte : bytes) {
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

std::string NextNonce() {
  static const std::string process = [] {
    std::random_device random;
    std::string bytes;
    for (int i = 0; i < 16; ++i) {
      bytes += char(random());
    }
    return Hexadecimal(bytes);
  }();
  static std::atomic<uint64_t> count{0};
  return process + "-" + std::to_string(count++);
}

bool IsEqual(const std::string& a, const std::string& b) {
  char difference = a.size() != b.size();
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
    difference |= a[i] ^ b[i];
  }
  return difference == 0;
}

} // namespace

std::string Sha256(const std::string& message) {
  return Hexadecimal(Digest(message));
}

std::string HmacSha256(const std::string& key, const std::string& message) {
  std::string block = key.size() > kBlock ? Digest(key) : key;
  block.resize(kBlock);
  std::string inner, outer;
  for (char byte : block) {
    inner += char(byte ^ 0x36);
    outer += char(byte ^ 0x5c);
  }
  return Hexadecimal(Digest(outer + Digest(inner + message)));
}

SignedRequest::SignedRequest(const std::string& method, const std::string& path,
                             const std::string& body) {
  const char* key = std::getenv(HOROVOD_RENDEZVOUS_KEY);
  if (key != nullptr && *key != '\0') {
    key_ = key;
    nonce_ = NextNonce();
    digest_ = Sha256(body);
    signature_ = HmacSha256(key_, "request\n" + method + "\n" + path + "\n" +
                                      nonce_ + "\n" + digest_);
  }
}

std::vector<std::string> SignedRequest::Headers() const {
  if (key_.empty()) {
    return {};
  }
  return {kNonce + nonce_, kDigest + digest_, kSignature + signature_};
}

bool SignedRequest::IsAnsweredBy(int status,
                                 const std::vector<std::string>& headers,
                                 const std::vector<uint8_t>& body) const {
  if (key_.empty()) {
    return true;
  }
  const std::string signature = HmacSha256(
      key_, "answer\n" + nonce_ + "\n" + std::to_string(status) + "\n" +
                Sha256(std::string(body.begin(), body.end())));
  for (const auto& line : headers) {
    if (line.compare(0, kSignature.size(), kSignature) == 0) {
      return IsEqual(line.substr(kSignature.size()), signature);
    }
  }
  return false;
}

} // namespace common
} // namespace horovod
