// Package identity decides who may say what about a node.
//
// A registry hands out bytes that anyone with access to it may have written. A [Trust] turns this
// node's own record into such bytes, and the bytes of others back into records it believes. [Plain]
// believes whatever the registry says, which is right where the registry itself lets only the right
// ones write.
package identity
