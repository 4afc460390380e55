// Bench compares Warren with others, each as its users would run it, and each figure as a ratio within one run.
//
//	make bench                        # everything, and the README's table and picture
//	go run . -h                       # in this folder
//	go run . -only 'TCP, 1 stream$'   # one row, nothing written
//
// In one process: two nodes over loopback. Every contender and round has a process of its own, so that processor time
// and memory are its own. Contenders take turns; a figure is the median of the rounds, beside the least and the most.
//
// Across two network namespaces joined by a veth, as root: programs, and iperf3 between them.
//
// It is a module of its own: what it compares with is no business of who uses Warren. tsnode and nebula are modules
// again, since they want other versions of what Warren uses.
package main
