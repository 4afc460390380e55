// Package wgconv turns datapath's types into the attributes of Linux's generic netlink family
// "wireguard" (include/uapi/linux/wireguard.h), and those attributes into datapath's types.
//
// It does no I/O and knows no device, so that what is said to a device can be checked without one, on
// any platform. What it writes never replaces all peers. No error holds a private or preshared key.
package wgconv
