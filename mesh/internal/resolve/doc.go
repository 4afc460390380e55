// Package resolve looks host names up in the background and keeps what was found.
//
// Nobody waits for a name server here: whoever wants addresses says which names it wants, reads what is
// known now together with a channel that closes once there is something newer, and goes on. A name that
// does not resolve keeps the addresses it had, because a name server out of order must not cut a tunnel
// that works.
//
// When a name is looked up:
//   - at once, when it is first wanted;
//   - again when its TTL is over, which is taken to be 5 s at least and 1 h at most, and up to a tenth
//     later, so that names learned together part;
//   - after a failure at a random time between 1 s and a ceiling of 2 s, 4 s, ... up to 1 min, for as long
//     as it takes;
//   - when its addresses are said not to work, but 10 s after the lookup before at the earliest.
//
// At most 8 lookups run at a time, each for 10 s at most, and at most 4 of them are for names that failed
// the last time: names that hang leave room for those that answer.
//
// Time is monotonic: a step of the clock changes nothing.
package resolve
