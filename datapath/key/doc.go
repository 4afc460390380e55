// Package key holds the three kinds of keys a WireGuard device knows, and the
// files a node's private key lives in.
//
// [Private] and [Public] are X25519 keys (RFC 7748), [Preshared] is the
// optional symmetric key WireGuard mixes into a handshake
// (https://www.wireguard.com/protocol/). All three are values: they compare
// with ==, serve as map keys, and their zero value means "none".
//
// # One spelling for each key
//
// Equal keys are equal values. A private key is clamped when it is made, as a
// device does when it is given one, so what was set compares equal to what is
// read back. A public key has exactly one accepted encoding: values at or above
// the field prime 2^255-19, and values with the unused top bit set, are other
// spellings of some other key and are refused, as are the points of low order,
// with which no secret can be agreed.
//
// # Keys that do not print
//
// A private or preshared key appears in no output unless [Private.Bytes] or
// [Private.Base64] (or their Preshared twins) is called: not under any verb of
// package fmt, in any log/slog handler, nor when it sits in an unexported field
// of another struct, where package fmt cannot see that the type has methods.
// Marshalling a key that is set fails rather than writing a placeholder, since a
// configuration that was saved without its key would be noticed only when it is
// needed. The bytes are not erased from memory when a key is no longer used; Go
// gives no way to promise that.
//
// Errors from parsing never repeat the input, not even for public keys: a
// private key pasted into the wrong field must not end up in a log.
package key
