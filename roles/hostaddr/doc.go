// Package hostaddr is the role of a node that others call: it knows at which of its host's addresses that is possible,
// and says so while they come and go, in the mesh's endpoints, and where asked as announced host prefixes.
//
// Others find a new address at once. One that is gone is kept for a moment ([Options.Damp]), since an interface that
// goes down is often up again soon, and who calls it meanwhile in vain goes on to the next.
//
// On Linux the kernel tells of changes of links, addresses and routes (rtnetlink(7)); elsewhere the host is looked at
// again and again.
package hostaddr
