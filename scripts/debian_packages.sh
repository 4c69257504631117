#!/bin/sh
# Installs the named Debian packages that are missing, when root on a Debian system; otherwise says what is missing.
missing=""
command -v dpkg-query >/dev/null 2>&1 || { echo "not a Debian system: install by hand if tests skip: $*"; exit 0; }
for package in "$@"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q "install ok installed" || missing="$missing $package"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" != 0 ]; then
  echo "missing Debian packages (their tests will be skipped):$missing"
  exit 0
fi
echo "installing Debian packages:$missing"
# Services must not start by themselves: the tests start their own on private ports.
printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d.allranks
if [ ! -e /usr/sbin/policy-rc.d ]; then
  mv /usr/sbin/policy-rc.d.allranks /usr/sbin/policy-rc.d && chmod +x /usr/sbin/policy-rc.d && made_policy=1
else
  rm -f /usr/sbin/policy-rc.d.allranks
fi
apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $missing >/dev/null
status=$?
[ -n "${made_policy:-}" ] && rm -f /usr/sbin/policy-rc.d
exit $status
